"""Says ``isolated`` if this process really is: no network, no processes of others, not the file named in its arguments.

Run as ``probe.py SECRET USER`` inside the isolation that is tried. Standard library alone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fleetbus_workers.environment.isolation.sandbox.inside import confine
else:
    import confine


def leaks() -> list[str]:
    """Leaks: what can be seen or done here that an isolation should prevent; empty if there are none."""
    found = []
    if [name for _, name in socket.if_nameindex() if name not in ("lo", "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0")]:
        found.append("network interfaces")
    if os.getppid() > 10 or os.getpid() > 10:
        found.append("processes of others")
    if os.path.exists("/proc"):
        found += leaks_of_proc()
    was_root = os.geteuid() == 0
    confine.confine({"NPROC": 4}, user=int(sys.argv[2]))
    if was_root and os.geteuid() != int(sys.argv[2]):
        found.append("no user of its own")
    if os.path.exists(sys.argv[1]):
        found.append("files of the host")
    if os.access("/", os.W_OK) or os.access("/usr", os.W_OK):
        found.append("files that can be written")
    if not os.access("/tmp", os.W_OK):
        found.append("no room for files of its own")
    try:
        import colorsys  # noqa: F401
    except ImportError:
        found.append("Python's own library cannot be read")
    if os.geteuid() == 0:
        found.append("root's rights")
    if not processes_are_limited():
        found.append("processes without a limit")
    return found


def leaks_of_proc() -> list[str]:
    """Leaks of what is mounted at /proc; it has to show this process's namespace alone."""
    if not os.path.exists("/proc/self/status") or any(int(name) > 10 for name in os.listdir("/proc") if name.isdigit()):
        return ["processes of others at /proc"]
    return [] if os.statvfs("/proc").f_flag & os.ST_RDONLY else ["a /proc that can be written"]


def processes_are_limited() -> bool:
    """True if some of eight forks are refused under the limit of four processes."""
    children = []
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    except OSError:
        return True
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return False


if __name__ == "__main__":
    sys.stdout.write(", ".join(leaks()) or "isolated")
