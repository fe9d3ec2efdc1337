"""The command line as a user meets it: help, exit codes, one-line errors, and what it does not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import anyio
import pytest

from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import find_server, run_server
from fleetbus_schemas import Subjects, WorkerStarted, decode
from fleetbus_workers.cli.program import COMMANDS

pytestmark = pytest.mark.integration

HEAVY = ("torch", "transformers", "numpy", "mcp", "nats", "rich", "structlog", "matplotlib", "httpx", "asyncio.runners")
"""Nothing of this is needed to show help."""

FLEETBUS = (sys.executable, "-m", "fleetbus_workers.cli")


def fleetbus(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}
    return subprocess.run(
        [*FLEETBUS, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=folder,
        env={**environment, **variables},
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom fleetbus_workers.cli.program import run_program\n"
        f"status = run_program({arguments!r})\n"
        f"print('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)), status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.splitlines()[-1] == "HEAVY [] 0"
    assert result.stdout.startswith("Usage: fleetbus")


def test_the_list_of_commands_says_of_each_what_its_own_help_says_first() -> None:
    shown = fleetbus("--help").stdout
    for name, entry in COMMANDS.items():
        assert entry.summary in shown, name


def test_flags_carry_the_descriptions_limits_and_defaults_of_the_settings() -> None:
    shown = " ".join(fleetbus("up", "--help").stdout.split())
    assert "--steps, --learner-steps N Training steps, each of one batch [80]" in shown
    assert "--learner-stale-groups [drop|keep|wait]" in shown
    assert "--evaluation-greedy / --no-evaluation-greedy" in shown
    assert "Settings of learner:" in shown and "Settings of limits:" in shown


def test_a_role_has_only_the_flags_of_the_tables_that_it_reads() -> None:
    shown = fleetbus("environment", "--help").stdout
    assert "--environment-slots" in shown and "--limits-open" in shown
    assert "--learner-groups" not in shown and "--inference-max-num-seqs" not in shown


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["inferense"], "did you mean inference?"),
        (["xyzzy"], "the commands are up, recipes, environment"),
        (["up", "--step", "5"], "--step"),
        (["up", "--seed"], "--seed"),
        (["environment", "--run", "a.b"], "run.name"),
        (["inference", "--name", "a.b", "--nats", "nats://127.0.0.1:1"], "--name"),
        (["learner"], "no server for run default: give --nats"),
        (["init"], "no server for run default"),
        (["learner", "--learner-stale-groups", "sometimes"], "sometimes"),
        (["schema", "--jsno"], "--jsno"),
        (["new", "env", "x"], "No such command 'env'; see `fleetbus new --help`"),
        (["drain"], "see `fleetbus drain --help`"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], part: str) -> None:
    result = fleetbus(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if " [info" not in line)
    assert line.startswith("fleetbus: ") and part in line


def test_an_unreadable_variable_or_file_is_refused_before_anything_else(tmp_path: Path) -> None:
    assert "FLEETBUS_LEARNER_STEP" in fleetbus("init", folder=tmp_path, FLEETBUS_LEARNER_STEP="3").stderr
    (tmp_path / "fleetbus.toml").write_text("[learner]\nstpes = 3\n")
    assert "did you mean steps?" in fleetbus("init", folder=tmp_path).stderr


def test_the_version_is_told() -> None:
    result = fleetbus("--version")
    assert (result.returncode, result.stdout) == (0, f"fleetbus {version('fleetbus')}\n")


def test_without_a_command_the_help_is_shown() -> None:
    result = fleetbus()
    assert result.returncode == 2
    assert "Usage: fleetbus" in result.stdout + result.stderr


def test_the_schema_is_json_that_names_every_message() -> None:
    import fleetbus_schemas

    result = fleetbus("schema")
    assert result.returncode == 0
    assert {message.__name__ for message in fleetbus_schemas.MESSAGES} <= set(json.loads(result.stdout)["$defs"])


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m fleetbus_workers.cli schema | head -c 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=50, check=True)
    assert result.stderr == ""


def test_the_starter_policy_is_found() -> None:
    result = fleetbus("starter", "--json")
    assert (Path(json.loads(result.stdout)["folder"]) / "config.json").is_file()


def test_a_starter_is_not_built_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    result = fleetbus("starter", str(tmp_path))
    assert result.returncode == 2 and "is not empty" in result.stderr


async def test_init_declares_the_streams_of_a_run_and_may_be_repeated(tmp_path: Path) -> None:
    async with run_server(tmp_path / "nats") as server:
        arguments = ("init", "--run", "r1", "--nats", server.url, "--nats-lanes", "2", "--json")
        first, second = fleetbus(*arguments, folder=tmp_path), fleetbus(*arguments, folder=tmp_path)
    assert (first.returncode, second.returncode, first.stderr) == (0, 0, "")
    declared = json.loads(first.stdout)
    assert declared["log"]["name"] == "fb_r1"
    assert len(declared["consumers"]) == 1 + 3 + 2


def test_a_crash_shows_where_it_happened_and_exits_1(tmp_path: Path) -> None:
    code = (
        "import sys, fleetbus_schemas.export\n"
        "def broken(): raise RuntimeError('something is broken')\n"
        "fleetbus_schemas.export.build_json_schema = broken\n"
        "from fleetbus_workers.cli.program import run_program\n"
        "sys.exit(run_program(['schema']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 1
    assert "RuntimeError: something is broken" in result.stderr and "line" in result.stderr


def test_a_user_error_out_of_a_task_group_is_still_one_line() -> None:
    code = (
        "import sys, fleetbus_schemas.export\n"
        "from fleetbus.errors import UserError\n"
        "def broken(): raise ExceptionGroup('tasks', [ExceptionGroup('more', [UserError('no such model: name another')])])\n"
        "fleetbus_schemas.export.build_json_schema = broken\n"
        "from fleetbus_workers.cli.program import run_program\n"
        "sys.exit(run_program(['schema']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (result.returncode, result.stderr) == (2, "fleetbus: no such model: name another\n")


def test_a_role_that_crashes_logs_it_and_exits_1(tmp_path: Path) -> None:
    code = (
        "import sys, fleetbus_workers.cli.roles.role\n"
        "async def broken(*_): raise RuntimeError('something is broken')\n"
        "fleetbus_workers.cli.roles.role._serve = broken\n"
        "from fleetbus_workers.cli.program import run_program\n"
        "sys.exit(run_program(['environment', '--nats', 'nats://127.0.0.1:1', '--log-format', 'json', '--name', 'e1']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path)
    assert result.returncode == 1
    _, line = result.stderr.splitlines()  # the first is its profile
    logged = json.loads(line)
    assert (logged["event"], logged["level"], logged["worker"], logged["role"]) == ("crashed", "error", "e1", "environment")
    assert "something is broken" in line


@pytest.mark.parametrize("role", [["environment"], ["recorder", "--archive", "kept"], ["gateway", "gym", "--port", "0"]])
async def test_a_role_of_a_run_that_nobody_declared_is_refused_in_one_line(tmp_path: Path, role: list[str]) -> None:
    async with run_server(tmp_path / "nats") as server:
        done = await anyio.to_thread.run_sync(lambda: fleetbus(*role, "--nats", server.url, "--run", "r1", folder=tmp_path))
    (line,) = (line for line in done.stderr.splitlines() if " [info" not in line)
    assert done.returncode == 2
    assert line == "fleetbus: no run r1 on this server: `fleetbus init --run r1` declares it; or check --run and --nats"


async def test_a_role_says_that_it_is_ready_drains_on_sigterm_and_exits_0(tmp_path: Path) -> None:
    async with run_server(tmp_path / "nats") as server, await anyio.open_file(tmp_path / "log", "wb") as log:
        assert fleetbus("init", "--nats", server.url, "--nats-lanes", "1", folder=tmp_path).returncode == 0
        process = await anyio.open_process(
            [*FLEETBUS, "environment", "--nats", server.url, "--nats-lanes", "1", "--name", "e1"],
            cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log.wrapped,
        )  # fmt: skip
        try:
            with anyio.fail_after(50):
                async with connect(server.url, run="default", role="test", worker="test") as bus:
                    async with bus.read([Subjects("default").life("environment", "e1")]) as reader:
                        assert isinstance(decode(WorkerStarted, (await reader.receive()).payload), WorkerStarted)
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()
    told = [line.split("]")[1].split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert told == ["profile", "ready", "draining", "stopped"]


@pytest.mark.parametrize("arguments", [["init"], ["environment"], ["audit"]])
def test_a_server_without_jetstream_is_named_as_such(tmp_path: Path, arguments: list[str]) -> None:
    command = [str(find_server()), "-a", "127.0.0.1", "-p", "-1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            listening = next(line for line in server.stderr if b"Listening for client connections" in line)
            next(line for line in server.stderr if b"Server is ready" in line)
            done = fleetbus(*arguments, "--nats", f"nats://{listening.decode().split()[-1]}", folder=tmp_path)
        finally:
            server.kill()
    (line,) = (line for line in done.stderr.splitlines() if " [info" not in line)
    assert done.returncode == 2 and "runs without JetStream: start it with `nats-server -js`" in line
