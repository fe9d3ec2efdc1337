"""The installed pytest plugin in tests of others: each fixture does what it says, and loading it costs nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, SamplingSettings, Subjects
from fleetbus_workers.inference.base import GenerationRequest

pytestmark = pytest.mark.timeout(180)

ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def test_loading_the_plugin_imports_nothing_but_pytest() -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import fleetbus_workers.pytest_plugin; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "['fleetbus_workers']"


@ASYNCIO
async def test_nats_server_serves_a_run(nats_server: Any) -> None:
    async with connect(nats_server.url, run="plugin", role="test") as bus:
        await bus.declare(plan_run("plugin", lanes=1, max_bytes=0))
        await bus.publish(Subjects("plugin").episode("e"), b"x")
        assert (await bus.log_state()).last_sequence == 1


async def test_memory_bus_is_a_declared_run(memory_bus: Any) -> None:
    async with memory_bus("mine") as bus:
        await bus.publish(Subjects("mine").episode("e"), b"x", expected_last=0)
        assert [entry.payload async for entry in bus.scan([Subjects("mine").log])] == [b"x"]


def test_recording_reads_relative_to_the_test(recording: Any) -> None:
    assert recording("recordings/guessing.fbrec").run == "small"
    with pytest.raises(UserError, match="nothing-here"):
        recording("nothing-here.fbrec")


def test_replay_gives_the_report_without_check_as_well(replay: Any, recording: Any) -> None:
    loaded = recording("recordings/warehouse.fbrec")
    loaded.entries = [entry for entry in loaded.entries if ".task." not in entry.subject]
    report = replay(loaded, check=False, environment="scripted")
    assert not report.same and report.skipped["episodes without a request in the recording"] == 17
    with pytest.raises(AssertionError, match="nothing could be compared"):
        replay(loaded, environment="scripted")


async def test_a_scripted_sampler_says_its_texts_turn_after_turn(scripted_sampler: Any) -> None:
    sampler = scripted_sampler("first", "the last ä")
    template = sampler.template

    async def say(episode: str, room: int = 64) -> tuple[str, str]:
        ids = template.encode_prompt([ChatMessage(role="user", content="go")], ())
        request = GenerationRequest(
            cache_key=episode,
            ids=ids,
            sampling=SamplingSettings(),
            stop_ids=template.stop_ids,
            max_tokens=room,
            seed=1,
        )
        generation = await sampler.generate(request)
        return template.decode_text(generation.ids), generation.finish_reason

    async with sampler.run():
        assert [await say("a"), await say("b"), await say("a"), await say("a")] == [
            ("first", "stop"),
            ("first", "stop"),
            ("the last ä", "stop"),
            ("the last ä", "stop"),
        ]
        assert await say("c", room=3) == ("fir", "length")


def test_a_virtual_clock_waits_in_no_time(virtual_clock: Any) -> None:
    async def sleep_a_day() -> float:
        await anyio.sleep(86_400)
        return anyio.current_time()

    assert virtual_clock(sleep_a_day) == 86_400


@pytest.mark.integration
def test_the_example_in_the_docs_passes_for_a_user_and_fails_when_the_environment_changes(tmp_path: Path) -> None:
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    block = re.search(r"\$ cat test_guessing\.py\n(.*?)```", (root / "docs" / "recordings.md").read_text(), re.DOTALL)
    assert block is not None and len(block[1].strip().splitlines()) == 5
    (tmp_path / "recordings").mkdir()
    shutil.copy(here / "recordings" / "guessing.fbrec", tmp_path / "recordings")
    (tmp_path / "test_guessing.py").write_text(block[1])
    environment = (here / "guessing.py").read_text()
    for source, code, said in (
        (environment, 0, "1 passed"),
        (environment.replace("worth {", "is {"), 1, "messages[0].content"),
    ):
        (tmp_path / "guessing.py").write_text(source)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "fleetbus_workers.pytest_plugin",
            "-p",
            "no:cacheprovider",
            str(tmp_path),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)
        assert done.returncode == code and said in done.stdout, done.stdout + done.stderr
