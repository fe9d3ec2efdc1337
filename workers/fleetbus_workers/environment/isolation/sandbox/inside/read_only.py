"""A further filter of system calls for code that only computes: it changes no file and arranges for no signal to others.

Standard library alone. Landlock does not cover owners, modes and times of files, and is not there on every machine; the files
may be of the same user, and so may be processes, whose memory can be written to below /proc.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fleetbus_workers.environment.isolation.sandbox.inside import confine
else:
    import confine

CHANGES = {
    "x86_64": {
        "creat": 85,
        "truncate": 76,
        "rename": 82,
        "mkdir": 83,
        "rmdir": 84,
        "link": 86,
        "unlink": 87,
        "symlink": 88,
        "chmod": 90,
        "fchmod": 91,
        "chown": 92,
        "fchown": 93,
        "lchown": 94,
        "utime": 132,
        "mknod": 133,
        "setpriority": 141,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "removexattr": 197,
        "lremovexattr": 198,
        "fremovexattr": 199,
        "utimes": 235,
        "ioprio_set": 251,
        "mkdirat": 258,
        "mknodat": 259,
        "fchownat": 260,
        "futimesat": 261,
        "unlinkat": 263,
        "renameat": 264,
        "linkat": 265,
        "symlinkat": 266,
        "fchmodat": 268,
        "utimensat": 280,
        "renameat2": 316,
    },
    "aarch64": {
        "setxattr": 5,
        "lsetxattr": 6,
        "fsetxattr": 7,
        "removexattr": 14,
        "lremovexattr": 15,
        "fremovexattr": 16,
        "ioprio_set": 30,
        "mknodat": 33,
        "mkdirat": 34,
        "unlinkat": 35,
        "symlinkat": 36,
        "linkat": 37,
        "renameat": 38,
        "truncate": 45,
        "fchmod": 52,
        "fchmodat": 53,
        "fchownat": 54,
        "fchown": 55,
        "utimensat": 88,
        "setpriority": 140,
        "renameat2": 276,
    },
}
CHANGES_EVERYWHERE = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469}
OPEN = {"x86_64": 2, "aarch64": -1}
OPENAT, OPENAT2 = {"x86_64": 257, "aarch64": 56}, 437
FCNTL, IOCTL = {"x86_64": 72, "aarch64": 25}, {"x86_64": 16, "aarch64": 29}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000
"""Flags of open that are refused; the last one is of files without a name."""

TO_OWNER = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: who gets a signal about a descriptor, and which."""

TO_OWNER_BY_IOCTL = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP, which do as F_SETOWN does."""


def forbid_changes() -> bool:
    """True if this process and all that it starts can from now on open no file for writing, change no file's name, mode, owner
    or time, no process's priority, and have no signal sent for a descriptor."""
    return confine.install(compile_read_only(os.uname().machine))


def compile_read_only(machine: str) -> bytes:
    """The filter as classic BPF; empty for machines whose numbers are not known here."""
    if machine not in CHANGES:
        return b""
    equal, any_bit = 0x15, 0x45
    refuse, allow = confine.ret(confine.REFUSE), confine.ret(confine.ALLOW)
    program = confine.begin_filter(machine)
    for changing in [*CHANGES[machine].values(), *CHANGES_EVERYWHERE.values()]:
        program += confine.jump_if(equal, changing, 0, 1) + refuse
    # Its flags are out of a filter's sight; libraries fall back to openat.
    program += confine.jump_if(equal, OPENAT2, 0, 1) + confine.ret(confine.ABSENT)
    for number, offset, test, values in (
        (OPEN[machine], 24, any_bit, (WRITING,)),
        (OPENAT[machine], 32, any_bit, (WRITING,)),
        (FCNTL[machine], 24, equal, TO_OWNER),
        (IOCTL[machine], 24, equal, TO_OWNER_BY_IOCTL),
    ):
        if number < 0:
            continue  # a machine without this call
        program += confine.jump_if(equal, number, 0, 2 * len(values) + 2) + confine.load(offset)
        for value in values:
            program += confine.jump_if(test, value, 0, 1) + refuse
        program += allow
    return program + allow
