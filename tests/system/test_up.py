"""`fleetbus up` as a process, with a real server and scripted roles: how it ends, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import psutil
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.streams import log_stream, tasks_consumer

SCRIPT = Path(__file__).with_name("scripted_roles.py")
pytestmark = [pytest.mark.timeout(300), pytest.mark.integration]

PROCESSES = 5
"""Server holder, nats-server, learner, environment, inference."""


class Up:
    """A running `up`. Its output is read at the end."""

    def __init__(self, process: anyio.abc.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.seen: dict[int, psutil.Process] = {}

    @property
    def run(self) -> Path:
        return self.folder / ".fleetbus" / "runs" / "default"

    def descendants(self) -> list[psutil.Process]:
        """All processes below `up` that were ever seen here and still run."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self.seen.update({process.pid: process for process in found})
        return [process for process in self.seen.values() if _is_running(process)]

    def named(self, word: str) -> psutil.Process:
        return next(process for process in self.descendants() if word in process.cmdline())

    async def output_has(self, text: str) -> None:
        await until(lambda: text in (self.folder / "out").read_text())

    async def everything_runs(self) -> None:
        await self.output_has("learner is ready")
        await self.output_has("environment is ready")
        await self.output_has("inference is ready")
        await until(lambda: len(self.descendants()) >= PROCESSES)

    async def ended(self, within: float) -> int:
        with anyio.fail_after(within):
            return await self.process.wait()

    @property
    def out(self) -> list[str]:
        return (self.folder / "out").read_text().splitlines()

    @property
    def errors(self) -> list[str]:
        return (self.folder / "err").read_text().splitlines()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], object], within: float = 100.0) -> None:
    """Wait for something that happens in other processes: only polling can."""
    with anyio.fail_after(within):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


@asynccontextmanager
async def up(folder: Path, *arguments: str, script: str = "train", **variables: str) -> AsyncIterator[Up]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = await anyio.open_process(
            [sys.executable, str(SCRIPT), "up", *arguments],
            cwd=folder,
            env={**environment, "SCRIPT": script, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    running = Up(process, folder)
    try:
        yield running
    finally:
        with anyio.CancelScope(shield=True):
            for left in running.descendants():
                left.kill()
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def run_to_the_end(folder: Path, *arguments: str, script: str = "train", **variables: str) -> tuple[int, Up]:
    async with up(folder, *arguments, script=script, **variables) as running:
        code = await running.ended(within=100)
        return code, running


def read_summary(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text())
    assert isinstance(content, dict)
    return content


async def test_it_trains_to_the_end_and_leaves_summary_and_picture(tmp_path: Path) -> None:
    code, ran = await run_to_the_end(tmp_path, "--steps", "3", "--json-summary", "copy.json")
    assert (code, ran.errors) == (0, [])
    assert ran.out[0].startswith("run default trains the starter policy on warehouse, 3 steps")
    assert [line.split(" · ")[0] for line in ran.out if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert any("25.0% → 75.0% sampled, 100.0% greedy" in line for line in ran.out)
    summary = read_summary(ran.run / "summary.json")
    assert summary == read_summary(tmp_path / "copy.json")
    assert summary["finished"] is True and summary["seed"] == 1
    assert (summary["success_start"], summary["success_end"], summary["success_end_greedy"]) == (0.25, 0.75, 1.0)
    assert (summary["optimizer_steps"], summary["episodes_trained"]) == (3, 12)
    assert summary["episodes_excluded"] == {"stale": 3}
    assert (summary["policy_versions"], summary["max_staleness_seen"]) == (3, 1)
    assert summary["max_logprob_difference"] == pytest.approx(3e-5)
    assert summary["seconds_by_stage"] == {"train": 0.75, "wait": 1.5, "episode_action": 6.0}
    assert summary["wall_seconds"] > 0
    assert (ran.run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert ran.descendants() == []


async def test_a_finished_run_called_again_says_so_and_more_steps_train_it_further(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, "--steps", "2")
    code, again = await run_to_the_end(tmp_path, "--json-summary", "copy.json")
    assert code == 0
    assert "run default is finished" in again.out[0] and "--steps" in again.out[-2] and "--run" in again.out[-1]
    assert read_summary(tmp_path / "copy.json")["optimizer_steps"] == 2
    async with up(tmp_path, "--steps", "4", script="wait") as further:
        await further.everything_runs()
        assert further.out[0].startswith("run default resumes")


async def test_a_fresh_run_forgets_the_one_before_also_its_settings(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, "--steps", "2", "--seed", "5")
    code, again = await run_to_the_end(tmp_path, "--steps", "3", "--fresh")
    assert (code, again.errors) == (0, [])
    assert again.out[0].startswith("run default trains")
    summary = read_summary(again.run / "summary.json")
    assert (summary["seed"], summary["steps"]) == (1, [1, 2, 3])


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
async def test_a_first_signal_drains_everything(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    async with up(tmp_path, script="wait") as running:
        await running.everything_runs()
        running.process.send_signal(sent)
        assert await running.ended(within=60) == code
        assert running.descendants() == []
    assert running.errors == []
    assert any("stopping" in line for line in running.out)
    assert any("`fleetbus up` resumes it" in line for line in running.out)
    assert read_summary(running.run / "summary.json")["finished"] is False


async def test_a_learner_that_will_not_stop_is_killed_in_time(tmp_path: Path) -> None:
    async with up(tmp_path, script="stubborn") as running:
        await running.everything_runs()
        running.process.send_signal(signal.SIGINT)
        assert await running.ended(within=60) == 130
        assert running.descendants() == []
    assert any("learner did not stop in time and was killed" in line for line in running.out)


async def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    async with up(tmp_path, script="stubborn") as running:
        await running.everything_runs()
        running.process.send_signal(signal.SIGINT)
        await running.output_has("stopping")
        running.process.send_signal(signal.SIGINT)
        assert await running.ended(within=60) == 130
        assert running.descendants() == []
    assert not any("did not stop in time" in line for line in running.out), "it waited for a limit"


async def test_a_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    async with up(tmp_path, script="wait") as running:
        await running.output_has("run default trains")
        await until(lambda: running.descendants())
        running.process.send_signal(signal.SIGINT)
        assert await running.ended(within=60) == 130
        assert running.descendants() == []


async def test_nothing_outlives_an_up_that_is_killed(tmp_path: Path) -> None:
    async with up(tmp_path, script="stubborn") as running:
        await running.everything_runs()
        running.process.kill()
        await running.ended(within=60)
        await until(lambda: running.descendants() == [])


async def test_a_worker_that_keeps_crashing_fails_the_run_and_its_last_words_are_shown(tmp_path: Path) -> None:
    code, ran = await run_to_the_end(tmp_path, script="crash")
    assert code == 1
    assert any("the last words of learner-4" in line for line in ran.errors)
    assert "learner ended with status 3 and was given up" in ran.errors[-1]
    assert sum("starting it again" in line for line in ran.out) == 4
    assert ran.descendants() == []


async def test_a_learner_that_crashed_once_is_started_again_and_finishes(tmp_path: Path) -> None:
    code, ran = await run_to_the_end(tmp_path, "--steps", "2", script="crash-once")
    assert code == 0
    assert any("learner ended with status 3; starting it again" in line for line in ran.out)
    assert read_summary(ran.run / "summary.json")["finished"] is True


async def test_a_run_whose_learner_was_replaced_by_another_has_not_succeeded(tmp_path: Path) -> None:
    code, ended = await run_to_the_end(tmp_path, "--steps", "40", script="replaced")
    assert code == 1
    assert "learner-elsewhere-7-ab has taken over the training at step 1 of 40" in ended.errors[-1]


@pytest.mark.parametrize("victim", ["-js", "fleetbus_workers.up.server"])
async def test_a_killed_server_comes_back_at_the_same_address_and_workers_go_on(tmp_path: Path, victim: str) -> None:
    async with up(tmp_path, script="wait") as running:
        await running.everything_runs()
        address = read_summary(running.run / "server.json")
        running.named(victim).kill()
        await until(lambda: read_summary(running.run / "server.json")["pid"] != address["pid"])
        assert read_summary(running.run / "server.json")["url"] == address["url"]
        running.named("environment").kill()
        await running.output_has("environment-1 is ready")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended(within=60) == 0
        assert running.descendants() == []


async def test_a_consumer_that_somebody_removed_is_there_again_for_the_worker_that_ended_because_of_it(tmp_path: Path) -> None:
    name = f"{log_stream('default')}.{tasks_consumer('default')}"
    async with up(tmp_path, script="wait") as running:
        await running.everything_runs()
        async with connect(read_summary(running.run / "server.json")["url"], run="default") as bus:
            await bus._connection.api.ask(f"CONSUMER.DELETE.{name}")
            running.named("environment").kill()
            await running.output_has("environment-1 is ready")
            assert (await bus._connection.api.ask(f"CONSUMER.INFO.{name}"))["name"] == tasks_consumer("default")


async def test_a_resumed_run_has_the_address_that_it_had_unless_somebody_took_it(tmp_path: Path) -> None:
    urls = []
    for _ in range(2):
        async with up(tmp_path, script="wait") as running:
            await running.everything_runs()
            urls.append(read_summary(running.run / "server.json")["url"])
            running.process.send_signal(signal.SIGTERM)
            assert await running.ended(within=60) == 0
    assert urls[0] == urls[1]
    with socket.create_server(("127.0.0.1", int(urls[0].rpartition(":")[2]))):
        async with up(tmp_path, script="wait") as running:
            await running.everything_runs()
            assert read_summary(running.run / "server.json")["url"] != urls[0]


async def test_a_second_up_of_the_same_run_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with up(tmp_path, script="wait") as running:
        await running.everything_runs()
        code, second = await run_to_the_end(other, "--run-folder", str(tmp_path / ".fleetbus" / "runs"))
        assert code == 2
        assert f"run default is already being trained (process {running.process.pid})" in second.errors[0]


async def test_an_up_that_is_refused_leaves_the_settings_of_the_last_start_as_they_were(tmp_path: Path) -> None:
    code, running = await run_to_the_end(tmp_path, "--steps", "2")
    assert code == 0
    files = [running.run / name for name in ("config.json", "run.json")]
    before = [file.read_bytes() for file in files]
    other_limit = ("--nats-max-bytes", str(1 << 30))  # the server refuses: the log was declared with another
    code, _ = await run_to_the_end(tmp_path, "--steps", "4", "--evaluation-episodes", "7", *other_limit)
    assert code != 0 and [file.read_bytes() for file in files] == before


async def test_settings_of_the_first_start_hold_when_it_is_resumed_and_its_identity_may_not_change(tmp_path: Path) -> None:
    code, _ = await run_to_the_end(tmp_path, "--steps", "7", "--seed", "5", script="train")
    assert code == 0
    code, other = await run_to_the_end(tmp_path, "--seed", "6")
    assert code == 2
    assert "this run was started with seed 5, not 6 (--seed)" in other.errors[0]
    code, same = await run_to_the_end(tmp_path)
    assert code == 0 and "7 steps" not in same.out[0] and "is finished" in same.out[0]


async def test_a_variable_of_the_users_reaches_the_roles_through_the_configuration_alone(tmp_path: Path) -> None:
    code, ran = await run_to_the_end(tmp_path, "--steps", "2", FLEETBUS_LEARNER_STEPS="9", FLEETBUS_LEARNER_GROUPS="3")
    assert code == 0
    config = json.loads((ran.run / "config.json").read_text())
    assert (config["learner"]["steps"], config["learner"]["groups"]) == (2, 3)
    assert "['FLEETBUS_LIMITS_DRAIN', 'FLEETBUS_NATS_URL']" in (ran.run / "logs" / "learner.log").read_text()


def model_without_weights(folder: Path) -> str:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    return str(model)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (lambda folder: ["--model", "nowhere"], ["no model folder", "nowhere"]),
        (lambda folder: ["--model", model_without_weights(folder)], ["lacks weights (*.safetensors)"]),
        (lambda folder: ["--tasks", "nowhere.json"], ["nowhere.json", "no such file"]),
        (lambda folder: ["--environment", "warehous"], ["warehous"]),
        (lambda folder: ["--environment", "mcp:no_such_module:make"], ["no_such_module"]),
        (lambda folder: ["--nats", "nats://127.0.0.1:1"], ["no NATS server at nats://127.0.0.1:1", "refused"]),
        (lambda folder: ["--nats", "nats://ada:hunter2@127.0.0.1:1"], ["no NATS server at nats://127.0.0.1:1"]),
        (lambda folder: ["--steps", "0"], ["--steps = 0", "at least 1"]),
        (lambda folder: ["--stepz", "3"], ["--stepz"]),
        (lambda folder: ["--config", "nowhere.toml"], ["nowhere.toml"]),
        (lambda folder: ["--run", "a.b"], ["run.name", "a.b"]),
        (lambda folder: ["--run-folder", "/proc/nowhere"], ["cannot write below /proc", "--run-folder"]),
        (lambda folder: ["--json-summary", "/proc/nowhere/summary"], ["cannot write below /proc", "--json-summary"]),
    ],
)
async def test_bad_input_is_one_line_and_exit_2_with_nothing_started(
    tmp_path: Path, arguments: Callable[[Path], list[str]], parts: list[str]
) -> None:
    code, ran = await run_to_the_end(tmp_path, *arguments(tmp_path))
    assert code == 2
    assert len(ran.errors) == 1 and ran.errors[0].startswith("fleetbus: ")
    for part in parts:
        assert part in ran.errors[0]
    assert "hunter2" not in ran.errors[0]
    assert ran.out == [] and not (tmp_path / ".fleetbus").exists()


async def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, ran = await run_to_the_end(tmp_path, "--nats-port", str(port))
    assert code == 2 and f"port {port} cannot be used" in ran.errors[0]
    assert not (tmp_path / ".fleetbus").exists()


async def test_a_server_of_the_users_is_used_and_left_running(tmp_path: Path) -> None:
    from fleetbus.bus.nats.server import run_server

    async with run_server(tmp_path / "own") as server:
        code, ran = await run_to_the_end(tmp_path, "--steps", "2", "--nats", server.url)
        assert code == 0, ran.errors
        assert not (ran.run / "nats").exists() and not (ran.run / "server.json").exists()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as connection:
            assert connection.recv(5) == b"INFO "
