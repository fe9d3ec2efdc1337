"""``fleetbus tasks import ors:...`` and the checks before a start: places become a tasks file, a mistake is one line."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import pytest
from click.testing import CliRunner

from fleetbus.tasks.files import load_dataset
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.cli.setup.tasks import command
from fleetbus_workers.environment.adapters.ors import client as ors_client
from fleetbus_workers.environment.adapters.ors import tasks as ors_tasks
from tests.support.ors_server import OrsDouble, ors_double


async def run(*words: str) -> tuple[int, str]:
    done = await anyio.to_thread.run_sync(partial(CliRunner().invoke, command, ["import", *words]))
    return done.exit_code, f"{done.output}{done.exception or ''}"


async def test_places_of_the_split_for_training_become_a_tasks_file(tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    async with ors_double() as double:
        assert await run(f"ors:{double.url}#Order", "--output", str(file), "--count", "3", "--env", "words") == (
            0,
            f"wrote 3 tasks to {file}\n",
        )
        tasks = load_dataset(str(file))
        assert [(task.key, task.env, task.prompt, task.config) for task in tasks[1:]] == [
            ("order-train-1", "words", "", {"split": "train", "index": 1}),
            ("order-train-2", "words", "", {"split": "train", "index": 2}),
        ]
        assert (await run(f"ors:{double.url}#order split=test", "--output", str(file)))[1] == f"wrote 10 tasks to {file}\n"
        assert {task.config["split"] for task in load_dataset(str(file))} == {"test"}


async def test_a_server_that_only_lists_its_tasks_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tasks.json"
    async with ors_double(environments=("order",)) as double:
        double.missing = "order/num_tasks"
        assert await run(f"ors:{double.url}", "--output", str(file)) == (0, f"wrote 50 tasks to {file}\n")


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("", "name an environment of the ORS server"),
        ("#chess", "no environment 'chess'; it has order, shelves"),
        ("#order split=dev", "no split 'dev'; its splits are train (train), test (test), trouble (validation)"),
        ("#order split=", "must be written as ors:URL[#ENVIRONMENT] [split=NAME]"),
        ("/elsewhere#order", "is no ORS server, or lacks a page: http://127.0.0.1:"),
    ],
)
async def test_a_mistake_is_one_line(rest: str, words: str, tmp_path: Path) -> None:
    async with ors_double() as double:
        status, said = await run(f"ors:{double.url}{rest}", "--output", str(tmp_path / "t.json"))
    assert status and words in said and "\n" not in said.strip() and not os.listdir(tmp_path)


async def test_a_start_is_refused_where_the_environment_or_the_server_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "tasks.json"
    async with ors_double() as double:
        await run(f"ors:{double.url}#order", "--output", str(file))

        async def start(spec: str) -> tuple[int, str]:
            code = await anyio.to_thread.run_sync(run_program, ["up", "--environment", spec, "--tasks", str(file)])
            return code, capsys.readouterr().err

        code, said = await start(f"ors:{double.url}#chess")
        assert (code, said.count("\n")) == (2, 1) and "no environment 'chess'; it has order, shelves" in said
        await double.server.kill()
        code, said = await start(f"ors:{double.url}#order")
        assert (code, said.count("\n")) == (2, 1) and "cannot be reached" in said
    assert os.listdir(tmp_path) == ["tasks.json"]


async def check(double: OrsDouble) -> str:
    done = await run(f"ors:{double.url}#order", "--output", "/dev/null")
    assert done[0]
    return done[1]


@pytest.mark.integration
async def test_a_server_that_sends_no_list_or_never_ends_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ors_tasks, "SECONDS", 1.0)
    monkeypatch.setattr(ors_client, "MAX_ANSWER_BYTES", 4 << 20)
    monkeypatch.setenv("ORS_API_KEY", "k-123456789")
    async with ors_double() as double:
        for listing, words in (
            (b'{"a": 1}', "is no ORS server"),
            (b"<html>", "is no ORS server"),
            (b'["\\ud800"', "is no ORS server"),
            (b"x" * (8 << 20), "has more than 4194304 bytes"),
            (None, "no answer within 1 s"),
        ):
            double.listing = listing
            said = await check(double)
            assert words in said and "k-123456789" not in said and "\n" not in said.strip(), said


async def test_a_server_whose_header_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ors_tasks, "SECONDS", 1.0)

    async def drip(client: anyio.abc.SocketStream) -> None:
        async with client:
            with suppress(anyio.BrokenResourceError):
                while True:
                    await client.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
                    await anyio.sleep(0.1)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, drip)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with anyio.fail_after(20):
            status, said = await run(f"ors:http://127.0.0.1:{port}", "--output", "/dev/null")
        tasks.cancel_scope.cancel()
    assert status and "no answer within 1 s" in said
