"""The processes that run verifiers: ended in time, replaced when they die, gone with whoever started them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.environment.isolation.verifier.own import WAREHOUSE
from fleetbus_workers.environment.isolation.verifier.sandbox import MAX_STARTS
from tests.support.backends import asyncio_and_trio
from tests.support.grading import LIMITS, Tools, grade
from tests.support.processes import children, until, wait_for_output

pytestmark = pytest.mark.integration

anyio_backend = asyncio_and_trio


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    verifier = Verifier(LIMITS)
    async with verifier.run():
        yield verifier


def the_zygote() -> psutil.Process:
    """The warm process of the verifier, which may stand below those that isolate it: they have its program further back in
    their own command lines, and wait for it for as long as it lives."""
    return next(child for child in children() if any(word.endswith("/zygote.py") for word in child.cmdline()[:5]))


async def test_a_verification_that_takes_too_long_ends_without_a_verdict() -> None:
    verifier = Verifier(VerifierLimits(seconds=2.0))
    async with verifier.run():
        reward, reason = await grade(verifier, "import time\ndef verify(env): time.sleep(60)")
        assert (reward, reason) == (None, "no verdict within 2 s")
        assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    await until(lambda: not children())


async def test_own_verifiers_share_a_process_and_others_have_one_each() -> None:
    own = WAREHOUSE.format(field="price", name="Bolt")
    foreign = "import os\ndef verify(env): return float(os.getppid())"
    verifier = Verifier(LIMITS)
    async with verifier.run():
        assert [(await grade(verifier, own, tools=Tools()))[0] for _ in range(3)] == [1.0, 1.0, 1.0]
        kept = [child.pid for child in the_zygote().children()]
        assert len(kept) == 1
        assert (await grade(verifier, foreign))[0] is not None
        await until(lambda: [child.pid for child in the_zygote().children()] == kept)
        assert (await grade(verifier, own, tools=Tools()))[0] == 1.0
        assert [child.pid for child in the_zygote().children()] == kept
        assert (await grade(verifier, own + "\n# changed", tools=Tools()))[0] == 1.0
        await until(lambda: [child.pid for child in the_zygote().children()] == kept)
    await until(lambda: not children())


class LateTools(Tools):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = anyio.Event()

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.hanging.set()
        await self.answer.wait()
        return await super().query(sql, params)


async def test_a_verification_that_outlives_its_verifier_starts_no_process() -> None:
    own, verifier, tools = WAREHOUSE.format(field="price", name="Bolt"), Verifier(LIMITS), LateTools()
    outcome: list[tuple[float | None, str]] = []

    async def verify() -> None:
        outcome.append(await grade(verifier, own, tools=tools))

    async with anyio.create_task_group() as tasks:
        async with verifier.run():
            tasks.start_soon(verify)
            with anyio.fail_after(50):
                await tools.hanging.wait()
        tools.answer.set()
    assert outcome == [(None, "the verifier was closed before its verdict")]
    await until(lambda: not children())


async def test_a_cancelled_verification_kills_its_process(verifier: Verifier) -> None:
    tools = Tools()
    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    zygote = the_zygote()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(grade, verifier, "def verify(env): return env.call_tool('hang')")
        tasks.start_soon(lambda: grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))
        with anyio.fail_after(50):
            await tools.hanging.wait()
        tasks.cancel_scope.cancel()
    await until(lambda: not zygote.children())
    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0


async def test_a_killed_process_is_replaced(verifier: Verifier) -> None:
    tools = Tools()
    outcome: list[tuple[float | None, str]] = []

    async def interrupted() -> None:
        outcome.append(await grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))

    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    zygote = the_zygote()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupted)
        with anyio.fail_after(50):
            await tools.hanging.wait()
        running = zygote.children()
        zygote.kill()
        assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
        tasks.cancel_scope.cancel()
    assert running
    assert not outcome or outcome[0][0] is None
    await until(lambda: not any(child.is_running() for child in running))


@pytest.mark.parametrize("deaths", [1, 99])
async def test_a_process_that_dies_while_it_starts_is_started_again_a_few_times(deaths: int, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.write_text("x" * deaths)
    mortal = tmp_path / "mortal.py"
    mortal.write_text(
        f"import os, runpy, sys\nleft = {str(left)!r}\n"
        "if os.path.getsize(left):\n os.truncate(left, os.path.getsize(left) - 1)\n sys.exit(1)\n"
        f"runpy.run_path({str(Verifier.program)!r}, run_name='__main__')\n"
    )

    class MortalVerifier(Verifier):
        program = mortal

    verifier = MortalVerifier(LIMITS, kinds=(), sandbox="limits")
    async with verifier.run():
        reward, reason = await grade(verifier, "def verify(env): return 1")
    assert (reward, reason) == (
        (1.0, "") if deaths == 1 else (None, "the process that runs verifiers dies as soon as it is started")
    )
    assert left.stat().st_size == max(deaths - MAX_STARTS, 0)
    assert not children()


async def test_nothing_is_left_behind_at_the_end() -> None:
    verifier = Verifier(LIMITS)
    with anyio.move_on_after(30):
        async with verifier.run(), anyio.create_task_group() as tasks:
            tools = Tools()
            tasks.start_soon(lambda: grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))
            await tools.hanging.wait()
            assert children()
            tasks.cancel_scope.cancel()
    await until(lambda: not children())


WORKER = """
import anyio, sys
from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, Kind, find_isolation
from fleetbus_workers.environment.isolation.verifier import Verifier

class Tools:
    async def call_tool(self, name, arguments):
        print("asked", flush=True)
        await anyio.sleep_forever()

async def main():
    verifier = Verifier()
    async with verifier.run():
        code = "def verify(env): return env.call_tool('hang')"
        await verifier.verify(code, final_answer=None, conversation=[], tools=Tools())

anyio.run(main)
"""


async def test_a_killed_worker_takes_its_verifications_with_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER], stderr=None) as worker:
        await wait_for_output(worker.stdout, b"asked")
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert len(processes) >= 2, "the warm process and one child"
    await until(lambda: not any(process.is_running() for process in processes))


async def test_signals_of_the_terminal_do_not_reach_the_verifications(verifier: Verifier) -> None:
    await grade(verifier, "def verify(env): return 1")
    zygote = the_zygote()
    assert os.getsid(zygote.pid) != os.getsid(0)


async def test_verifying_outside_of_running_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"run\(\)"):
        await Verifier().verify("def verify(): return 1", final_answer=None, conversation=[], tools=Tools())
