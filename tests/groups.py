"""Every opt-in group of tests, one after another, and a table of what ran in docs/test_groups.md: ``just all-groups``.

    just all-groups                 # all of them: hours, most of them for installing what a group needs
    just all-groups trl sinks api   # some; the rows of the others stay as they are, with the commit that they ran at
    just all-groups --minutes 20 slow   # no group longer than that: what had passed by then is counted, and the row says so

Each group is a recipe of the justfile with a time limit; what it prints is in build/groups/GROUP.log. What a machine lacks is
named instead of run. Exits with 1 if a test failed or a group did not finish.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/test_groups.md"
OUTPUTS = ROOT / "build/groups"
HEAD = """# Opt-in groups of tests

Written by `just all-groups [GROUP ...]`. These need what the tests of every change do without: packages of others, a Docker
engine, a browser, or minutes. Those of every change are run by `bash .ci/run`
([decisions 0238](decisions/0238-once-more-and-said.md) and
[0262](decisions/0262-the-fast-suite-is-of-tests-of-under-a-second.md)).

| group | passed | failed | skipped | result | seconds | commit |
|---|---|---|---|---|---|---|
"""
CLOSING = re.compile(r"^(?:=+ )?(?=.*\b\d+ (?:passed|failed|skipped|errors?|deselected)\b)(.*) in [0-9.]+s", re.MULTILINE)
TALLY = re.compile(r"\b(\d+) (passed|failed|skipped|error)")
GREEN = "green"
CLOSING_SECONDS = 60.0
"""For pytest to end its fixtures and to print what had passed, once interrupted."""


def lacks_docker() -> str:
    engine = shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False)
    return "" if engine and engine.returncode == 0 else "no Docker engine runs"


def lacks_compose() -> str:
    return lacks_docker() or ("" if shutil.which("docker-compose") else "no docker-compose")


def lacks_browser() -> str:
    if find_spec("playwright") is None:
        return "no playwright"
    return "" if any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")) else "no chromium"


def lacks_worlds() -> str:
    missing = [name for name in ("chromium", "java") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}" if missing else ""


def lacks_gpu() -> str:
    return "" if shutil.which("nvidia-smi") else "no GPU"


def lacks_vagen() -> str:
    return "" if os.environ.get("VAGEN_CHECKOUT") else "VAGEN_CHECKOUT names no checkout of VAGEN"


def lacks_foreign() -> str:
    checkouts = {"VERIFIERS_CHECKOUT": "verifiers", "TAU2_CHECKOUT": "tau2-bench"}
    missing = next((name for name in checkouts if not os.environ.get(name)), "")
    return missing and f"{missing} names no checkout of {checkouts[missing]}"


class Group(NamedTuple):
    """``recipe``: words after `just`. ``lacks`` names what this machine does not have for it."""

    recipe: str
    minutes: int
    lacks: Callable[[], str] = str


GROUPS = {
    "trl": Group("test-trl", 30),
    "openenv": Group("test-openenv", 20),
    "foreign": Group("test-foreign", 120, lacks_foreign),
    "worlds": Group("test-worlds", 40, lacks_worlds),
    "sinks": Group("test-sinks", 20),
    "api": Group("test-api", 30),
    "games": Group("test-games", 20),
    "fleet-sdk": Group("test-fleet-sdk", 10),
    "agents": Group("test-agents", 90),
    "clients": Group("test-clients", 40, lacks_vagen),
    "trainers": Group("test-trainers", 40),
    "vllm": Group("test-vllm", 60),
    "vllm-cuda": Group("test-vllm-cuda", 60),
    "gpu": Group("test-gpu", 10, lacks_gpu),
    "tinker": Group("test-tinker", 60),
    "browser": Group("test-browser", 20, lacks_browser),
    "docker": Group("test-docker", 30, lacks_docker),
    "compose": Group("test-compose", 40, lacks_compose),
    "pythons": Group("test-pythons", 40),
    "attacks": Group("attacks", 40),
    "fuzz": Group("fuzz all 600", 75),
    "upgrade": Group("upgrade", 10),
    "slow": Group("test-slow", 90),
    "planted": Group("planted-faults", 60),
    "chaos": Group("chaos 1", 20),
}


class Row(NamedTuple):
    group: str
    tally: Counter[str]
    result: str
    seconds: float
    commit: str

    def line(self) -> str:
        failed = self.tally["failed"] + self.tally["error"]
        numbers = f"{self.tally['passed']} | {failed} | {self.tally['skipped']}"
        return f"| {self.group} | {numbers} | {self.result} | {self.seconds:.0f} | {self.commit} |"


def wait_at_most(running: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None once the time is over. Then the process group is interrupted, so that pytest still says what had
    passed, and killed, so that nothing of it stays."""
    try:
        return running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        running.wait(timeout=CLOSING_SECONDS)
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(running.pid, signal.SIGKILL)
    return None


def run_group(name: str, group: Group) -> Row:
    """Run one recipe in a process group of its own, which is ended with all that it started once its minutes are over."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    if missing := group.lacks():
        return Row(name, Counter(), f"not possible here: {missing}", 0.0, commit)
    just = shutil.which("just", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "just"
    started = time.monotonic()
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    file = OUTPUTS / f"{name}.log"
    with (
        file.open("w") as log,
        subprocess.Popen(
            [just, *group.recipe.split()], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as running,
    ):
        status = wait_at_most(running, group.minutes * 60)
    output = file.read_text(errors="replace")
    result = f"not finished in {group.minutes} minutes" if status is None else judge(output, status)
    print(output[-4000:], flush=True)
    return Row(name, count(output), result, time.monotonic() - started, commit)


def count(output: str) -> Counter[str]:
    """The sum over the closing lines of every pytest that ran."""
    tally: Counter[str] = Counter()
    for closing in CLOSING.findall(output):
        for number, kind in TALLY.findall(closing):
            tally[kind] += int(number)
    return tally


def judge(output: str, status: int) -> str:
    tally = count(output)
    if not tally["passed"] + tally["failed"] + tally["error"]:
        if status == 0 and tally["skipped"]:
            return "not possible here: every test was skipped"
        last = next((line for line in reversed(output.splitlines()) if "error" in line.lower()), "")
        return f"no test ran: {last.strip()[:120]}".replace("|", "/")
    return GREEN if status == 0 else "red"


def write_table(rows: list[Row]) -> None:
    """The rows that ran, and those of the others as they were."""
    lines = dict(re.findall(r"^\| ([a-z-]+) (\|.*)$", TABLE.read_text() if TABLE.exists() else "", re.MULTILINE))
    lines |= {row.group: row.line().removeprefix(f"| {row.group} ") for row in rows}
    kept = [f"| {name} {lines.get(name, '| | | | not run yet | | |')}\n" for name in GROUPS]
    TABLE.write_text(HEAD + "".join(kept))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="just all-groups", description="Run opt-in groups of tests.")
    parser.add_argument("names", nargs="*", metavar="GROUP", help=f"by default all: {', '.join(GROUPS)}")
    parser.add_argument("--minutes", type=int, default=max(group.minutes for group in GROUPS.values()), help="most for a group")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.names) - set(GROUPS):
        print(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    # A shell lets what it starts in the background ignore interrupts, and so would every pytest below: none would be counted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = []
    for name in chosen.names or GROUPS:
        group = GROUPS[name]
        rows.append(run_group(name, group._replace(minutes=min(group.minutes, chosen.minutes))))
        write_table(rows)
        print(rows[-1].line(), flush=True)
    print(TABLE.read_text())
    return int(any(row.result != GREEN and not row.result.startswith("not possible") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
