"""The environment that the docs show: it is what stands there, short, and it works, alone and in a fleet."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from fleetbus.tasks.files import load_tasks
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.specs import SPEC_FORMS, build_environment_factory, format_markdown_table
from tests.support.small_deployment import build_configuration, small_deployment

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "guess.py"


@pytest.fixture
def in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "guess", raising=False)


def test_the_docs_show_the_example_as_it_is_and_it_is_short() -> None:
    code = EXAMPLE.read_text()
    assert f"```python\n{code}```" in (DOCS / "environments.md").read_text()
    assert len(code.splitlines()) <= 60


def test_every_kind_that_the_docs_name_exists() -> None:
    text = (DOCS / "environments.md").read_text()
    assert format_markdown_table() in text
    table = text.partition("| SPEC |")[2].partition("\n\n")[0]
    kinds = [cell for line in table.splitlines()[2:] for cell in line.split("|")[1].split("`")[1::2]]
    assert len(kinds) > 8
    assert [kind for kind in kinds if kind.split(":")[0].split("[")[0] not in SPEC_FORMS] == []


@pytest.mark.usefixtures("in_its_folder")
async def test_the_example_is_played_by_its_spec() -> None:
    environment = build_environment_factory("guess:Guess", verifier=None)()  # type: ignore[arg-type]
    await environment.open(Task(key="t", prompt="Play.", seed=1, config={"tries": 3}))
    assert "3 tries" in str((await environment.reset()).messages[0].content)
    number = (await environment.state())["number"]
    for text, hint in (("?", "not a number"), (str(number + 1), "Lower")):
        step = await environment.step(Action(episode_id="e", attempt=1, turn=0, text=text))
        assert hint in str(step.messages[0].content)
    assert (await environment.step(Action(episode_id="e", attempt=1, turn=2, text=f"It is {number}."))).terminated
    assert await environment.verify() == Verdict(reward=1.0)
    await environment.close()


@pytest.mark.usefixtures("in_its_folder")
async def test_the_example_s_tasks_are_played_by_a_fleet() -> None:
    factory = build_environment_factory("guess:Guess", verifier=None)  # type: ignore[arg-type]
    with anyio.fail_after(50):
        async with small_deployment(build_configuration()) as fleet:
            fleet.environment("environment-0", make=factory)
            fleet.inference("inference-0")
            for task in load_tasks(EXAMPLE.with_suffix(".json")):
                await fleet.request(task.key, task=task)
            results = await fleet.all_results(3)
    assert {result.outcome for result in results} == {"completed"}
    assert {result.reward for result in results} <= {0.0, 1.0}
