"""Namespaces and mounts for machines without bubblewrap: ``jail.py DESCRIPTION COMMAND...``. Standard library alone.

Three processes: this one waits; the first of the new process namespace makes the root and collects the dead; the command runs
below it. When this one is killed, so is everything below.

The description (JSON) has ``own_users`` (a user namespace is needed), ``bind`` (files and folders of the host that are seen,
read-only, by where they are inside), ``link`` (symbolic links), ``scratch_bytes`` (size of /tmp), ``writable`` (folders of the
host by where they are inside), ``hidden`` (folders and files below seen ones that are empty), ``loopback`` (whether there is
one), ``proc`` (whether its own processes are seen at /proc, read-only).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

LIBRARY = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_CGROUPS, NEW_NAMES, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mounted file system (`os.statvfs`) that a remount must repeat, as flags of mount."""
DETACH = 2
PARENT_DEATH_SIGNAL = 1
SET_INTERFACE_FLAGS, INTERFACE_UP = 0x8914, 1
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Devices inside and what they are outside. Both zero and full give zeros; zero could be mapped, as uncounted memory."""


def main() -> NoReturn:
    """Build the jail and run the command in it; exits as the command does."""
    description, command = json.loads(sys.argv[1]), sys.argv[2:]
    die_with_parent(os.getppid())
    enter_namespaces(own_users=description["own_users"])
    if description.get("loopback"):
        start_loopback()
    inside = os.fork()
    if inside:
        close_all()
        exit_like(inside)
    LIBRARY.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    build_root(description)
    worker = os.fork()
    if worker:
        close_all()
        exit_like(worker)
    os.setsid()
    os.chdir("/tmp")
    environment = {"HOME": "/tmp", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.execve(command[0], command, environment)


def die_with_parent(parent: int) -> None:
    """Be killed when ``parent`` dies, also if it has died already."""
    LIBRARY.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespaces(*, own_users: bool) -> None:
    """Namespaces of its own of every kind, without any network; ``own_users`` where this is not root."""
    user, group = os.getuid(), os.getgid()
    flags = NEW_MOUNTS | NEW_CGROUPS | NEW_NAMES | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    check(LIBRARY.unshare(flags | (NEW_USERS if own_users else 0)), "unshare")
    if own_users:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def start_loopback() -> None:
    """Let programs inside reach each other at 127.0.0.1, as bubblewrap does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_INTERFACE_FLAGS, struct.pack("16sh14x", b"lo", INTERFACE_UP))


def build_root(description: dict[str, Any]) -> None:
    """A root of a few read-only folders and an empty /tmp; the host's own root is gone afterwards."""
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    os.mkdir("/tmp/host")
    check(LIBRARY.syscall(PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/host"), "pivot_root")
    os.chdir("/")
    scratch("/tmp", description["scratch_bytes"])  # first of all, so that a Python or a checkout below /tmp is seen in it
    for path, source in description["bind"].items():
        bind(path, source=source)
    for path in description.get("hidden", ()):
        hide(path)
    for path, outside in description.get("writable", {}).items():
        bind(path, writable=True, source=outside)
    for name, device in DEVICES.items():
        bind(f"/dev/{name}", writable=True, source=f"/dev/{device}")
    for path, target in description["link"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    scratch("/dev/shm", description["scratch_bytes"] // 4)
    if description.get("proc"):
        show_processes()
    check(LIBRARY.umount2(b"/host", DETACH), "umount")
    os.rmdir("/host")
    mount("none", "/", "", REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)


def show_processes() -> None:
    """This namespace's processes at /proc, read-only; a user namespace may do so while the host's own is mounted, in full."""
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", NO_SETUID | NO_DEVICES | NO_PROGRAMS | READ_ONLY)


def scratch(path: str, size: int) -> None:
    """An empty folder in memory of ``size`` bytes that every user may write to."""
    os.makedirs(path, exist_ok=True)
    mount("tmpfs", path, "tmpfs", NO_SETUID | NO_DEVICES, f"size={size},mode=1777")


def hide(path: str) -> None:
    """An empty folder or file over one that is seen."""
    if os.path.isdir(path):
        mount("tmpfs", path, "tmpfs", NO_SETUID | NO_DEVICES | READ_ONLY, "size=4k,mode=755")
    else:
        mount("/host/dev/null", path, "", BIND)


def bind(path: str, *, source: str, writable: bool = False) -> None:
    """Show a file or folder of the host at ``path``, read-only unless ``writable``. No part of ``source`` is a link: where the
    host's root is not the root any more, an absolute one leads elsewhere."""
    source = f"/host{source}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    mount(source, path, "", BIND | RECURSIVE)
    if not writable:
        present = os.statvfs(path).f_flag
        kept = sum(flag for bit, flag in KEPT_FLAGS.items() if present & bit)
        mount("none", path, "", REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES | kept)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2); raises `OSError` that names the target."""
    result = LIBRARY.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    check(result, f"mount {target}")


def check(result: int, what: str) -> None:
    """Raise the error of the last call into the C library unless it gave 0."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def close_all() -> None:
    """The command's descriptors must not stay open here when it closes them."""
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))


def exit_like(child: int) -> NoReturn:
    """Collect the dead until ``child`` is among them, then exit as it did."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
