"""Every attack under every user and isolation that this machine can give, and a table of what was tried: ``just attacks``.

Users: root if this is root, and one without rights. Isolations: bubblewrap, namespaces alone, and neither, where a filter of
system calls refuses new namespaces to everybody. All attacks run under the first isolation that this machine has; under each
further one those that depend on it. Arguments go to pytest. Exits with 1 if an attack succeeded or none was tried.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fleetbus_workers.environment.isolation.sandbox.inside import confine
from fleetbus_workers.environment.isolation.sandbox.inside.jail import BIND, PRIVATE, RECURSIVE

ROOT = Path(__file__).parents[2]
NOBODY = 65534
NEW_MOUNTS = 0x20000
BY_ISOLATION = (
    "test_agent_folders",
    "test_agents",
    "test_forged_rewards",
    "test_hidden_setups",
    "test_own_rewards",
    "test_siblings_of_verifiers",
    "test_uncounted_memory",
    "test_without_isolation",
)
"""What depends on the isolation; everything else depends at most on the user."""

ISOLATIONS = ("bubblewrap", "namespaces", "none")
NAMESPACES = {"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "pivot_root": (155, 41)}


def main() -> int:
    """Run all and print the table."""
    users = [0, NOBODY] if os.geteuid() == 0 else [os.geteuid()]
    rows, failed = [], False
    for user in users:
        lacking = {isolation: find_lack(user, isolation) for isolation in ISOLATIONS}
        for isolation, whole in plan(lacking):
            head = f"{'root' if user == 0 else f'user {user}':10} {isolation:11}"
            if lacking[isolation]:
                rows.append(f"{head} not possible here: {lacking[isolation]}")
                continue
            found, code = attack(user, isolation, whole=whole)
            failed |= code != 0 or not found.get("passed")
            row = f"{head} refused {found.get('passed', 0):4}  succeeded {found.get('failed', 0):3}"
            rows.append(f"{row}  not possible here {found.get('skipped', 0):3}")
    print("", *rows, sep="\n")
    return int(failed)


def plan(lacking: Mapping[str, str]) -> list[tuple[str, bool]]:
    """The isolations in order, and under which of them all attacks are tried: the first one that this machine has."""
    first = next(isolation for isolation in ISOLATIONS if not lacking[isolation])
    return [(isolation, isolation == first) for isolation in ISOLATIONS]


def find_lack(user: int, isolation: str) -> str:
    """The reason why this user has no such isolation here, in one line; empty if it has."""
    if isolation == "none":
        return ""
    asked = (
        "from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, require_isolation\n"
        f"try: require_isolation(({isolation!r},))\nexcept IsolationUnavailable as unavailable: print(unavailable)"
    )
    with tempfile.TemporaryDirectory(prefix="fleetbus-attacks-") as home:
        os.chown(home, user, -1)
        done = subprocess.run(
            [sys.executable, "-c", asked],
            cwd=ROOT,
            env=os.environ | {"HOME": home, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: enter(user, isolation, Path(home)),
        )
    return " ".join((done.stdout or done.stderr[-200:]).split())[:200]


def attack(user: int, isolation: str, *, whole: bool) -> tuple[dict[str, int], int]:
    """Counts of outcomes as pytest names them, and its exit status."""
    files = ["tests/attacks"] if whole else [f"tests/attacks/{name}.py" for name in BY_ISOLATION]
    with tempfile.TemporaryDirectory(prefix="fleetbus-attacks-") as home:
        os.chown(home, user, -1)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            f"--basetemp={home}/pytest",
            *files,
        ]
        print(f"== user {user}, {isolation}", flush=True)
        process = subprocess.Popen(
            [*command, *sys.argv[1:]],
            cwd=ROOT,
            env=os.environ | {"HOME": home, "PYTHONDONTWRITEBYTECODE": "1", "FLEETBUS_ATTACKS_ISOLATION": isolation},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: enter(user, isolation, Path(home)),
        )
        assert process.stdout is not None
        closing = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line if " in " in line else closing
        code = process.wait()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", closing)}
    counts["failed"] = counts.get("failed", 0) + counts.pop("error", 0)
    return counts, code


def enter(user: int, isolation: str, home: Path) -> None:
    """Become the user, under whom Python can still be read, and lose what the isolation is not to have."""
    if user != os.geteuid():
        show_python(home)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if isolation == "none":
        machine = os.uname().machine
        column = list(confine.ARCHITECTURES).index(machine)
        program = confine.begin_filter(machine)
        for numbers in NAMESPACES.values():
            program += confine.jump_if(0x15, numbers[column], 0, 1) + confine.ret(confine.REFUSE)
        program += confine.jump_if(0x15, confine.CLONE3[column], 0, 1) + confine.ret(confine.ABSENT)
        program += confine.jump_if(0x15, confine.CLONE[column], 0, 3) + confine.load(16)
        program += (
            confine.jump_if(0x45, confine.NEW_NAMESPACES, 0, 1) + confine.ret(confine.REFUSE) + confine.ret(confine.ALLOW)
        )
        if not confine.install(program):
            raise OSError("no filter of system calls here")


def show_python(home: Path) -> None:
    """Python may lie in a home folder that others cannot enter: show this process Python, without the rest of that folder."""
    prefix = Path(sys.base_prefix)
    closed = [folder for folder in (*reversed(prefix.parents), prefix) if not folder.stat().st_mode & 1]
    if not closed:
        return
    library = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
        if library.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options) != 0:
            raise OSError(ctypes.get_errno(), f"mount {target}")

    if library.unshare(NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, RECURSIVE | PRIVATE)
    held = home / "python"
    held.mkdir()
    mount(str(prefix), str(held), None, BIND | RECURSIVE)
    mount("none", str(closed[0]), b"tmpfs", 0, b"mode=755")
    prefix.mkdir(parents=True)
    mount(str(held), str(prefix), None, BIND | RECURSIVE)


if __name__ == "__main__":
    sys.exit(main())
