"""An episode with seats that is checked: contexts and tools by seat, and what is said of mistakes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from fleetbus.config.settings import Configuration, RunSettings
from fleetbus_schemas import Action, ChatMessage, Task, ToolSpec
from fleetbus_workers.environment.adapter_context import Factory
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.environment.check.episode import PlayedEpisode, play_episode
from fleetbus_workers.environment.check.quick import check_quickly

PROPOSE, SOLVE = (ToolSpec(name=name, description="", parameters={"type": "object"}) for name in ("propose", "solve"))


def say(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=text),)


class Duo:
    """One proposes, the other solves, and the first hears of it."""

    replayable = True
    first = "proposer"
    solving = (SOLVE,)
    repeated: tuple[ToolSpec, ...] = (PROPOSE,)
    rewards: Mapping[str, float | None] = {"proposer": 0.0, "solver": 1.0}

    async def open(self, task: Task) -> None:
        self.played = 0

    async def reset(self) -> Start:
        return Start(messages=say("propose"), tools=(PROPOSE,), seat=self.first)

    async def step(self, action: Action) -> Step:
        self.played += 1
        if self.played == 3 or not self.first:
            return Step(terminated=True)
        if self.played == 1:
            return Step(messages=say("solve"), seat="solver", tools=self.solving)
        return Step(messages=say("solved"), seat="proposer", tools=self.repeated)

    async def state(self) -> dict[str, object]:
        return {}

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5, seats=self.rewards)

    async def close(self) -> None:
        pass


async def play(**changes: object) -> tuple[PlayedEpisode, list[tuple[list[object], list[str]]]]:
    """The episode, and what its policy was shown and offered at each turn."""
    asked: list[tuple[list[object], list[str]]] = []

    def answer(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
        asked.append(([message.content for message in messages], [tool.name for tool in tools]))
        return f"answer {len(asked)}"

    environment = type("Changed", (Duo,), changes)
    return await play_episode(environment, Task(key="a"), answer, Configuration(), turns=9), asked


async def test_each_seat_is_asked_in_its_own_context_with_its_own_tools() -> None:
    episode, asked = await play()
    assert asked == [
        (["propose"], ["propose"]),
        (["solve"], ["solve"]),
        (["propose", "answer 1", "solved"], ["propose"]),
    ]
    assert not episode.problems


@pytest.mark.parametrize(
    ("changes", "said", "is_failure"),
    [
        ({"repeated": (SOLVE,)}, "Step.tools are read when a seat acts for the first time only", False),
        ({"solving": (SOLVE, SOLVE)}, "two tools are called solve", True),
        ({"rewards": {"proposer": 1.0, "solvr": 0.0}}, "has no reward for it, and names solvr, which did not act", False),
        ({"rewards": {"proposer": 1.0, "solver": float("nan")}}, "the seat solver is not trained: its verdict is nan", False),
        ({"first": ""}, "Verdict.seats names proposer, solver, and the episode has no seats", False),
        ({"rewards": {"proposer": 1.0, "solver": 0.0, "late": 1.0}}, "", False),
        ({"rewards": {"proposer": 1.0, "solver": None}}, "", False),
    ],
)
async def test_a_mistake_with_seats_is_named(changes: dict[str, object], said: str, is_failure: bool) -> None:
    episode, _ = await play(**changes)
    assert [problem.is_failure for problem in episode.problems] == [is_failure] * bool(said)
    assert all(said in problem.text for problem in episode.problems)


@pytest.mark.parametrize(
    ("seats", "said"),
    [
        ("solver=simulator", ""),
        (
            "solvr=simulator",
            "gives the seat solvr to another policy, and here it did not act: the seats that acted are",
        ),
        ("proposer=a\nsolver=b", "no seat has a reward"),
    ],
)
async def test_a_seat_of_another_policy_that_does_not_act_is_named(seats: str, said: str) -> None:
    configuration = Configuration(run=RunSettings(seats=seats))
    episode = await play_episode(Duo, Task(key="a"), lambda *_: "answer", configuration, turns=9)
    assert [said in problem.text for problem in episode.problems] == [True] * bool(said)


@pytest.mark.parametrize(("turns", "fails"), [(2, False), (3, True)])
async def test_an_episode_that_is_cut_short_before_a_trained_seat_acts_is_no_failure(turns: int, fails: bool) -> None:
    """`up` plays three turns: a simulated user that calls tools may have them all. One that ends so is never trained."""
    configuration = Configuration(run=RunSettings(seats="proposer=a\nsolver=b"))
    episode = await play_episode(Duo, Task(key="a"), lambda *_: "answer", configuration, turns=turns)
    assert episode.has_failed == fails


def test_up_warns_of_a_seat_that_did_not_act(capsys: pytest.CaptureFixture[str]) -> None:
    configuration = Configuration(run=RunSettings(seats="solvr=simulator"))
    check_quickly(Factory(Duo), "duo.py:Duo", Task(key="a"), configuration)
    assert "warning: run.seats gives the seat solvr to another policy, and here it did not act" in capsys.readouterr().err
