"""Gives up rights, resources and dangerous system calls of a process inside, before foreign code runs. Standard library alone.

Nothing here can be taken back by the code that runs afterwards. Works without privileges, and without namespaces too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LIBRARY = ctypes.CDLL(None, use_errno=True)
FIRST_USER = 0x40000000
"""User ids from here on belong to nobody: each process that starts as root takes one of its own."""

NOBODY = 65534

CAPABILITY_VERSION_3 = 0x20080522
SET_DUMPABLE, SET_SECCOMP, NO_NEW_PRIVILEGES = 4, 22, 38
SECCOMP_FILTER = 2
ALLOW = 0x7FFF0000
REFUSE, ABSENT, NO_FAMILY = 0x00050000 | 1, 0x00050000 | 38, 0x00050000 | 97
"""Ends of a filter: the call is made, or fails with EPERM, ENOSYS or EAFNOSUPPORT."""
NEW_NAMESPACES = 0x7E020000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
"""System call numbers from here on are the x32 twins of the ordinary ones."""

FORBIDDEN = {
    # memory that no limit of a process counts
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),  # a page in a pipe keeps the large page alive that it was a part of
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # parts of the kernel that code has no business with
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),  # one count of the whole machine bounds it (fs.aio-max-nr), databases beside it included
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
"""System calls that are refused: their numbers on x86_64 and on aarch64."""

MMAP = (9, 222)
SHARED, WITHOUT_FILE = 1, 0x20
SETSOCKOPT = (54, 208)
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, and the two that exceed the system's limit."""

CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
FAMILIES = (1, 16)
"""AF_UNIX and AF_NETLINK. Others have buffers that grow (TCP on loopback) or know no namespaces (AF_VSOCK)."""

INTERNET = (2, 10)
"""AF_INET and AF_INET6, for programs that talk to a server through their loopback: the kernel bounds the buffers of all
(tcp_mem)."""

TO_OTHERS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "sigqueue": (129, 138), "tgsigqueue": (297, 240)}
"""System calls that signal the process in their first argument, where 0 is a whole group of processes."""

OF_OTHERS = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""System calls that change the process in their first argument, where 0 is the caller itself."""


_ANY_PROCESS = 0x7FFFFFF1


def confine(limits: Mapping[str, int], *, user: int, loopback: bool = False) -> None:
    """Set ``limits`` (names of `resource` without their prefix, to soft limits), then give up every right.

    A process that is root becomes ``user``. ``loopback``: it may use the network of its namespace.
    """
    set_limits(limits)
    drop_privileges(user)
    forbid_calls(loopback=loopback)


def set_limits(limits: Mapping[str, int]) -> None:
    """Limit this process and its children; ``limits`` as in `confine`. What a system refuses to limit stays as it is."""
    for name, soft in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            try:
                # One second more is the hard limit of time: the soft one names the cause.
                resource.setrlimit(kind, (soft, soft + (name == "CPU")))
            except (OSError, ValueError):
                pass  # macOS refuses RLIMIT_AS


def drop_privileges(user: int) -> None:
    """Become ``user`` where this is root, and lose capabilities, set-uid programs and core dumps for good."""
    for other in (user, NOBODY):  # a container may have no users but the first 65,536, a user namespace of its own none
        if os.geteuid() == 0:
            try:
                os.setgroups([])
                os.setresgid(other, other, other)
                os.setresuid(other, other, other)
            except OSError:
                continue
    if sys.platform == "linux":
        LIBRARY.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        LIBRARY.capset(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))
        LIBRARY.prctl(SET_DUMPABLE, 0, 0, 0, 0)


def forbid_calls(*, loopback: bool = False) -> bool:
    """True if the system calls of `FORBIDDEN` are refused from now on, for this process and all that it starts."""
    return install(compile_filter(os.uname().machine, families=(*FAMILIES, *INTERNET) if loopback else FAMILIES))


def block_signals() -> bool:
    """True if this process can from now on neither make sockets nor signal, limit or schedule any process but itself."""
    return install(_ALONE.replace(struct.pack("=I", _ANY_PROCESS), struct.pack("=I", os.getpid())))


def install(program: bytes) -> bool:
    """True if ``program`` filters the system calls of this process from now on."""
    if sys.platform != "linux" or not program:
        return False
    LIBRARY.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    return bool(LIBRARY.prctl(SET_SECCOMP, SECCOMP_FILTER, header, 0, 0) == 0)


def compile_filter(machine: str, *, own_process: int = 0, families: tuple[int, ...] = FAMILIES) -> bytes:
    """A filter as classic BPF: of `FORBIDDEN`, or of sockets and of what reaches any process but ``own_process``. Empty for
    machines whose numbers are not known here."""
    if machine not in ARCHITECTURES:
        return b""
    column = list(ARCHITECTURES).index(machine)
    allow, refuse, absent = ret(ALLOW), ret(REFUSE), ret(ABSENT)
    program = begin_filter(machine)
    if own_process:
        # After the tests stand two endings (allow, refuse), then whether the first argument is 0, then whether it is oneself.
        # Threads have the process's own id, for there is but one.
        calls = [(SOCKET, 1), *((call, 2) for call in OF_OTHERS.values()), *((call, 4) for call in TO_OTHERS.values())]
        for position, (numbers, ending) in enumerate(calls):
            program += jump_if(0x15, numbers[column], len(calls) - position - 1 + ending, 0)
        program += allow + refuse + load(16) + jump_if(0x15, 0, 3, 0)
        return program + load(16) + jump_if(0x15, own_process, 1, 0) + refuse + allow
    for numbers in FORBIDDEN.values():
        program += jump_if(0x15, numbers[column], 0, 1) + refuse
    # Shared memory without a file stays when its pages are dropped from every process, where no count of a process finds it.
    program += jump_if(0x15, MMAP[column], 0, 4) + load(40)
    program += jump_if(0x45, SHARED, 0, 2) + jump_if(0x45, WITHOUT_FILE, 0, 1) + refuse + load(0)
    for numbers in (SOCKET, SOCKETPAIR):
        program += jump_if(0x15, numbers[column], 0, len(families) + 3) + load(16)
        for position, family in enumerate(families):
            program += jump_if(0x15, family, len(families) - position, 0)
        program += ret(NO_FAMILY) + load(0)
    program += jump_if(0x15, SETSOCKOPT[column], 0, 2 * len(BUFFER_SIZES) + 2) + load(32)
    for option in BUFFER_SIZES:
        program += jump_if(0x15, option, 0, 1) + refuse
    program += load(0)
    # The flags of clone3 are out of a filter's sight; libraries fall back to clone where there is no clone3.
    program += jump_if(0x15, CLONE3[column], 0, 1) + absent
    program += jump_if(0x15, CLONE[column], 0, 3) + load(16) + jump_if(0x45, NEW_NAMESPACES, 0, 1) + refuse
    return program + allow


def begin_filter(machine: str) -> bytes:
    """Refuse what is of another architecture, then load the number of the system call."""
    refuse = ret(REFUSE)
    program = load(4) + jump_if(0x15, ARCHITECTURES[machine], 1, 0) + refuse + load(0)
    return program + jump_if(0x35, X32, 0, 1) + refuse if machine == "x86_64" else program


def load(offset: int) -> bytes:
    """Load a word of the system call's data: 0 its number, 4 the architecture, 16 the low half of its first argument, 24 of
    its second, 32 of its third, 40 of its fourth."""
    return struct.pack("=HBBI", 0x20, 0, 0, offset)


def jump_if(test: int, value: int, then: int, otherwise: int) -> bytes:
    """Skip ``then`` or ``otherwise`` instructions; ``test`` is 0x15 equal, 0x35 at least, 0x45 any bit of."""
    return struct.pack("=HBBI", test, then, otherwise, value)


def ret(action: int) -> bytes:
    return struct.pack("=HBBI", 0x06, 0, 0, action)


_ALONE = compile_filter(os.uname().machine, own_process=_ANY_PROCESS)
"""Compiled once, for processes that fork many that need it."""
