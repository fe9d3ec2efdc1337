"""A replay that several processes share finds what one finds; a process that gave verdicts before gives the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fleetbus.errors import UserError
from fleetbus.recording import load_recording
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.replay import Replay, Report, replay_recording
from fleetbus_workers.replay.report import UNLOADED, Difference
from fleetbus_workers.replay.shards import count_jobs, merge_reports, share_of

HERE = Path(__file__).parent
GUESSING = HERE / "recordings" / "guessing.fbrec"
WAREHOUSE = HERE / "recordings" / "warehouse.fbrec"

pytestmark = [pytest.mark.timeout(300), pytest.mark.integration]

SENTENCE = "worth {worth}"


@contextmanager
def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> Iterator[str]:
    """The spec of an environment that every process can import."""
    source = (HERE / "guessing.py").read_text().replace(SENTENCE, sentence)
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    yield f"{name}:Guessing"


async def test_three_processes_compare_what_one_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with module(tmp_path, monkeypatch, "guessing_shared", SENTENCE) as spec:
        report = await replay_recording(GUESSING, Replay(environment=spec, jobs=3))
    report.check()
    assert (report.compared, report.jobs) == ({"Observation": 66, "EpisodeFinished": 33}, 3)
    assert "by 3 processes" in report.lines()[0]
    assert report.recorded_seconds == load_recording(GUESSING).seconds


async def test_a_planted_change_is_the_same_first_difference_for_one_process_and_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with module(tmp_path, monkeypatch, "guessing_changed", "is worth {worth}") as spec:
        alone, shared = [await replay_recording(GUESSING, Replay(environment=spec, jobs=jobs)) for jobs in (1, 2)]
    assert alone.first is not None and alone.first == shared.first
    assert alone.first.field == "messages[0].content"
    assert len(shared.differences) == len(alone.differences) == 33


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_replay_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = tmp_path / "began"
    hanging = f"pathlib.Path({str(began)!r} + str(os.getpid())).touch(); await anyio.sleep_forever()"
    (tmp_path / "guessing_hanging.py").write_text(
        "import os, pathlib, anyio\n"
        "class Hanging:\n"
        "    replayable = True\n"
        f"    async def open(self, task): {hanging}\n"
        "    async def reset(self): ...\n"
        "    async def step(self, action): ...\n"
        "    async def state(self): return {}\n"
        "    async def verify(self): ...\n"
        "    async def close(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with anyio.create_task_group() as group:
        group.start_soon(replay_recording, GUESSING, Replay(environment="guessing_hanging:Hanging", jobs=2))
        while len(found := [path.name for path in tmp_path.glob("began*")]) < 2:  # noqa: ASYNC110, ASYNC240
            await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    processes = [int(name.removeprefix("began")) for name in found]
    with anyio.fail_after(60):
        while any(psutil.pid_exists(process) for process in processes):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_what_a_share_cannot_do_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_module"):
        await replay_recording(GUESSING, Replay(environment="no_such_module:Nothing", jobs=2))
    nothing = tmp_path / "nothing.fbrec"
    nothing.write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a recording"):
        await replay_recording(nothing, Replay(jobs=2))


def test_small_recordings_and_what_only_this_process_has_are_replayed_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment() -> Any:
        raise NotImplementedError

    assert count_jobs(WAREHOUSE, Replay()) == 1
    monkeypatch.setattr("fleetbus_workers.replay.shards.WORTH_SHARING_BYTES", 1)
    monkeypatch.setattr("fleetbus_workers.replay.shards.count_processors", lambda: 6)
    assert count_jobs(WAREHOUSE, Replay()) == count_jobs(WAREHOUSE, Replay(role="inference")) == 6
    assert count_jobs(WAREHOUSE, Replay(role="learner")) == count_jobs(WAREHOUSE, Replay(environment=environment)) == 1
    assert count_jobs(WAREHOUSE, Replay(speed=1.0)) == 1


def test_every_episode_belongs_to_one_share() -> None:
    shares = [share_of(f"episode-{number}", 4) for number in range(400)]
    assert set(shares) == {0, 1, 2, 3} and min(map(shares.count, range(4))) > 50


def test_differences_of_all_shares_stand_in_the_order_of_the_log() -> None:
    def report(*sequences: int) -> Report:
        each = [Difference(message="m", field="f", recorded="", replayed="", sequence=number) for number in sequences]
        return Report(role="environment", differences=each)

    merged = merge_reports([report(7, 3), report(), report(5, 2)])
    assert [each.sequence for each in merged.differences] == [2, 3, 5, 7]
    assert merged.first is not None and merged.first.sequence == 2


def test_versions_that_every_process_tried_to_load_are_counted_once() -> None:
    def report() -> Report:
        return Report(role="inference", advice="keep", skipped=Counter({f"{UNLOADED} (gone)": 9, "failed actions (E)": 2}))

    merged = merge_reports([report(), report(), report()])
    assert merged.skipped == {f"{UNLOADED} (gone)": 9, "failed actions (E)": 6} and merged.advice == "keep"


class Rows:
    """What verifier code may ask."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        raise LookupError(name)

    async def query(self, sql: str, params: Any) -> Any:
        return [[sql, *params]]


async def verdict(verifier: Verifier, code: str, answer: str = "") -> Any:
    return await verifier.verify(code, final_answer=answer, conversation=[], tools=Rows())


PROCESS = "import os\ndef verify(env): return float(os.getpid())"


LIMITS = VerifierLimits(seconds=20.0, cpu_seconds=1)


async def test_one_process_gives_verdict_after_verdict() -> None:
    verifier = Verifier(LIMITS, reuse_processes=True)
    async with verifier.run():
        processes = {(await verdict(verifier, PROCESS)).reward for _ in range(5)}
        other = await verdict(verifier, "def check(final_answer): return final_answer == 'yes'", "yes")
    assert len(processes) == 1 and other.reward == 1.0


async def test_what_one_verifier_leaves_behind_the_next_does_not_see() -> None:
    verifier = Verifier(LIMITS, reuse_processes=True)
    async with verifier.run():
        first = await verdict(verifier, "left = 1\nprint('said')\ndef verify(env): return 1.0")
        second = await verdict(verifier, "def verify(env): return float('left' in globals())")
    assert (first.reward, first.reason) == (1.0, "said")
    assert (second.reward, second.reason) == (0.0, "")


@pytest.mark.parametrize(
    "code",
    [
        "def verify(env): raise ValueError('no')",
        "def verify(env): return 'much'",
        "def verify(env): return float('nan')",
        "import os\ndef verify(env): os._exit(3)",
        "async def verify(env): return float(len(await env.query('rows', [1, 2])))",
        "def verify(env):\n    try: env.call_tool('none')\n    except Exception as error: print(error); return 0.5",
        "def verify(:",
    ],
)
async def test_a_verdict_and_the_lack_of_one_are_those_of_a_fresh_process(code: str) -> None:
    repeating, fresh = Verifier(LIMITS, reuse_processes=True), Verifier(LIMITS)
    async with repeating.run(), fresh.run():
        await verdict(repeating, PROCESS)
        assert await verdict(repeating, code) == await verdict(fresh, code)
        assert (await verdict(repeating, PROCESS)).reward is not None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_limit_of_cpu_time_holds_for_each_verdict() -> None:
    """Several that use most of it pass; one that uses more has no verdict."""
    verifier = Verifier(LIMITS, reuse_processes=True)
    spend = "import time\ndef verify(env):\n    while time.process_time() - started < {}: pass\n    return 1.0\n"
    spend += "started = time.process_time()"
    async with verifier.run():
        with anyio.fail_after(120):
            assert [(await verdict(verifier, spend.format(0.6))).reward for _ in range(3)] == [1.0, 1.0, 1.0]
            ended = await verdict(verifier, spend.format(60))
    assert ended.reward is None and "SIGXCPU" in ended.reason
