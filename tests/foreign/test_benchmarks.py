"""Benchmarks by name: all tasks of a package, what they are of, and room for their episodes. Without the package itself."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.api.evaluation import evaluate_run
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.environment.adapters.foreign import benchmarks
from fleetbus_workers.environment.adapters.foreign.benchmarks import BENCHMARKS, Benchmark, BenchmarkFacts, load_benchmark
from tests.support.small_deployment import small_deployment

NAME = "bfcl-multi-turn"
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
FACTS = BenchmarkFacts(name=NAME, package="bfcl-eval", version="1", digest="sha256:0", tasks=800)
TASKS = [Task(key=f"{each}_{n}", env=each) for each in CATEGORIES for n in range(200)]
BENCHMARK = Benchmark(FACTS, BENCHMARKS[NAME], "bfcl:multi_turn", "python", TASKS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "x", "--benchmark", "nothing"], "no benchmark 'nothing'; there are bfcl-multi-turn"),
        (["--model", "x", "--benchmark", NAME], "name an interpreter for its package with --environment-python PATH"),
        (["--model", "x", "--benchmark", NAME, "--environment-python", "/no/python"], "'/no/python' is no program"),
        (["--model", "x", "--benchmark", NAME, "--environment-python", sys.executable], "-m pip install --no-deps bfcl-eval=="),
        (["--model", "x", "--benchmark", NAME, "--tasks", "tasks.json"], "leave out --recipe, --environment and --tasks"),
    ],
)
def test_what_keeps_a_benchmark_from_being_played_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(["evaluate", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_tasks_say_which_package_and_data_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[dict[str, Any]] = [
        {"key": "base_0", "env": "base", "prompt": "Do.", "config": {"id": "base_0", "digest": "sha256:0"}}
    ]
    answer = {"tasks": listed, "source": {"package": "bfcl-eval", "version": "1", "digest": "sha256:0"}}

    def run(command: list[str], **_: Any) -> Any:
        assert command[-2:] == ["multi_turn", "split=train"]
        return type("Done", (), {"returncode": 0, "stdout": json.dumps(answer).encode()})

    monkeypatch.setattr("subprocess.run", run)
    loaded = load_benchmark(f"{NAME} split=train", sys.executable)
    assert loaded.facts == msgspec.structs.replace(FACTS, name=f"{NAME} split=train", tasks=1)
    assert loaded.tasks == [
        Task(key="base_0", env="base", prompt="Do.", config=listed[0]["config"], dataset_version="bfcl-eval 1 sha256:0")
    ]


def test_of_some_tasks_each_category_has_its_share() -> None:
    assert BENCHMARK.choose_tasks(None) == TASKS
    assert Counter(task.env for task in BENCHMARK.choose_tasks(40)) == dict.fromkeys(CATEGORIES, 10)
    assert [task.key for task in BENCHMARK.choose_tasks(1)] == ["base_0"]
    assert len(BENCHMARK.choose_tasks(9999)) == 800


def test_episodes_have_the_room_that_the_benchmark_needs_unless_a_setting_says_otherwise() -> None:
    fitted = BENCHMARK.fit(Configuration(), {"episode.max_turns": "the command line"}, context=16_384)
    assert (fitted.run.environment, fitted.run.tasks, fitted.environment.python) == ("bfcl:multi_turn", "", "python")
    assert fitted.episode.max_turns == Configuration().episode.max_turns
    assert (fitted.episode.max_tokens, fitted.episode.max_episode_tokens, fitted.inference.max_model_len) == (
        1024,
        16_384,
        16_384,
    )
    assert BENCHMARK.fit(Configuration(), {}).episode.max_turns == benchmarks.BENCHMARKS[NAME].turns


@pytest.mark.integration
async def test_a_run_whose_workers_play_its_own_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with small_deployment() as fleet:
        fleet.environment("environment")
        fleet.inference("inference")

        def open_run(*_: Any, **__: Any) -> Any:
            return fleet.server.connect(fleet.configuration.run.name, worker="operator")

        monkeypatch.setattr("fleetbus_workers.api.evaluation.open_run", open_run)
        with pytest.raises(UserError, match="is active, and its workers play its own tasks: stop it first"):
            await evaluate_run(fleet.configuration, benchmark=BENCHMARK)
