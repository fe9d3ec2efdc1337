"""Finds the isolation that this machine permits, and a command line that runs a program in it.

Both kinds give the same: own network (none), own processes, a read-only root that holds Python and the system's libraries and
nothing else of the host, an empty /tmp of bounded size, no environment variables, and the end of everything inside when the
process that was started is killed. What works is not guessed: a probe runs in it and looks for leaks.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import anyio.to_thread
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.environment.isolation.sandbox.inside.confine import FIRST_USER

Kind = Literal["bubblewrap", "namespaces"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces")

INSIDE = Path(__file__).with_name("inside")
"""The folder of our own programs that run inside, visible there under its own path."""

PROBE_SECONDS = 20.0
SCRATCH_BYTES = 64 << 20
_LIBRARIES = (
    "/lib",
    "/lib64",
    "/lib32",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/usr/share/zoneinfo",
)
_PROGRAMS = ("/bin", "/usr/bin")


class IsolationUnavailable(UserError):
    """Neither kind of isolation works on this machine."""


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of isolation that was seen to work. ``own_users``: it needs a user namespace, for lack of root's rights.
    ``private_proc``: it can show its own processes at /proc (decision 0206)."""

    kind: Kind
    own_users: bool
    private_proc: bool = False

    def command(
        self,
        program: Sequence[str],
        *,
        visible: Sequence[str | Path] = (),
        tools: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
        writable: Mapping[str, str] | None = None,
        hidden: Sequence[str | Path] = (),
        loopback: bool = False,
        proc: bool = False,
    ) -> list[str]:
        """The command line that runs ``program`` inside; it inherits the descriptors that it is given.

        ``visible``: folders and files that are seen besides Python's, read-only. ``tools``: also the system's programs.
        ``writable``: folders of this machine by where they are inside; they stay when the program has ended. ``hidden``: what
        of the visible is empty inside. ``loopback``: its processes may reach each other at 127.0.0.1. ``proc``: they see each
        other at /proc, read-only, where this isolation can show it.
        """
        emptied = [str(path) for path in hidden if os.path.exists(path)]
        visible_paths = list(_list_visible_paths(visible, tools))
        if self.kind == "bubblewrap":
            return [
                *_build_bubblewrap_arguments(visible_paths, scratch_bytes, writable or {}, emptied, own_users=self.own_users),
                *(("--proc", "/proc", "--remount-ro", "/proc") if proc and self.private_proc else ()),
                *("--remount-ro", "/", "--"),
                *program,
            ]
        description = {
            "own_users": self.own_users,
            "bind": {path: os.path.realpath(path) for path, link in visible_paths if not link},
            "link": [(path, link) for path, link in visible_paths if link],
            "scratch_bytes": scratch_bytes,
            "writable": {inside: os.path.realpath(outside) for inside, outside in (writable or {}).items()},
            "hidden": emptied,
            "loopback": loopback,
            "proc": proc and self.private_proc,
        }
        jail = str(INSIDE / "jail.py")
        return [sys.executable, "-I", "-S", "-B", jail, msgspec.json.encode(description).decode(), *program]


def build_python_command(script: Path, *arguments: str) -> list[str]:
    """Our own Python running a program of ours, isolated from all that is configured or installed."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", str(script), *arguments]


def list_readable(*visible: str | Path) -> list[str]:
    """The paths that a program inside may read: Python, the system's libraries, and ``visible``."""
    return [path for path, _ in _list_visible_paths(visible, tools=False)]


_detected: dict[tuple[Kind, ...], Isolation | str] = {}


async def find_isolation(kinds: Sequence[Kind] = KINDS) -> Isolation:
    """The first of ``kinds`` that isolates on this machine, tried once per process. Raises `IsolationUnavailable`."""
    if tuple(kinds) in _detected:
        return require_isolation(kinds)
    return await anyio.to_thread.run_sync(require_isolation, kinds)


def require_isolation(kinds: Sequence[Kind] = KINDS) -> Isolation:
    """`find_isolation` for those who may wait a few hundredths of a second."""
    key = tuple(kinds)
    if key not in _detected:
        _detected[key] = _try_all(key)
    detected = _detected[key]
    if isinstance(detected, str):
        raise IsolationUnavailable(
            f"no sandbox works here ({detected}): install bubblewrap (apt-get install bubblewrap), or permit user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1; in a container: --security-opt seccomp=unconfined), or use Linux"
        )
    return detected


def _try_all(kinds: Sequence[Kind]) -> Isolation | str:
    reasons = []
    for kind in kinds:
        if sys.platform != "linux":
            reasons.append(f"{kind}: needs Linux")
            continue
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            reasons.append("bubblewrap: not installed")
            continue
        for own_users, private_proc in product((False, True) if os.geteuid() == 0 else (True,), (True, False)):
            isolation = Isolation(kind=kind, own_users=own_users, private_proc=private_proc)
            leak = _find_leak(isolation)
            if not leak:
                return isolation
            reasons.append(f"{kind}: {leak}")
    return "; ".join(dict.fromkeys(reasons)) or "none is allowed"


def _find_leak(isolation: Isolation) -> str:
    """The fault of an isolation, in one line; empty if it works."""
    with tempfile.NamedTemporaryFile(prefix="fleetbus-probe-") as secret:
        os.chmod(secret.name, 0o644)
        probe = build_python_command(INSIDE / "probe.py", secret.name, str(FIRST_USER + os.getpid()))
        command = isolation.command(probe, visible=[INSIDE], proc=True)
        try:
            completed = subprocess.run(
                command, env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {PROBE_SECONDS:g} s"
        except OSError as error:
            return str(error)
    answer = completed.stdout.decode(errors="replace").strip()
    if completed.returncode == 0 and answer == "isolated":
        return ""
    lines = completed.stderr.decode(errors="replace").strip().splitlines()
    return answer or (lines[-1] if lines else f"exit code {completed.returncode}")


def _list_visible_paths(visible: Sequence[str | Path], tools: bool) -> Iterator[tuple[str, str]]:
    """The paths that are seen inside, parents first: a path, and what it points to if it is a symbolic link."""
    executable = os.path.realpath(sys.executable)
    python = [executable, os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_prefix, "lib64")]
    wanted = dict.fromkeys([*_LIBRARIES, *(_PROGRAMS if tools else ()), *python, *map(str, visible)])
    bound: list[str] = []
    for path in sorted(wanted):
        if os.path.islink(path) and path.count("/") == 1:
            yield path, os.readlink(path)
        elif os.path.exists(path) and not any(path.startswith(f"{above}/") for above in bound):
            bound.append(path)
            yield path, ""


def _list_parents(path: str) -> Iterator[str]:
    return map(str, Path(path).parents)


def _build_bubblewrap_arguments(
    visible_paths: Sequence[tuple[str, str]],
    scratch_bytes: int,
    writable: Mapping[str, str],
    hidden: Sequence[str],
    *,
    own_users: bool,
) -> Iterator[str]:
    yield from (shutil.which("bwrap") or "bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv")
    if own_users:
        yield from ("--unshare-user", "--uid", "65534", "--gid", "65534")
    else:
        # Only what is needed to become somebody else and to end what then is somebody else's.
        yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL")
    # First of all, so that a Python or a checkout below /tmp is seen in it.
    yield from ("--perms", "1777", "--size", str(scratch_bytes), "--tmpfs", "/tmp")
    parents = {parent for path in (*dict(visible_paths), *writable) for parent in _list_parents(path)} - {"/", "/tmp"}
    for parent in sorted(parents):
        yield from ("--perms", "0755", "--dir", parent)
    for path, link in visible_paths:
        yield from ("--symlink", link, path) if link else ("--ro-bind", path, path)
    for path in hidden:
        yield from (
            ("--perms", "0755", "--tmpfs", path, "--remount-ro", path)
            if os.path.isdir(path)
            else (
                "--ro-bind",
                "/dev/null",
                path,
            )
        )
    for inside, outside in writable.items():
        yield from ("--bind", outside, inside)
    yield from ("--dev", "/dev", "--perms", "1777", "--size", str(scratch_bytes // 4), "--tmpfs", "/dev/shm")
    yield from (
        "--dev-bind",
        "/dev/full",
        "/dev/zero",
    )  # it gives zeros, too, and cannot be mapped as memory that is not counted
    yield from ("--remount-ro", "/dev", "--setenv", "HOME", "/tmp")
    yield from ("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8")
    yield from ("--chdir", "/tmp")
