"""Environments that tell turns ahead as they may not: each ends its own episode with one line that says why, and nothing of it
is left half done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import EnvironmentSettings
from fleetbus_schemas import Action, ChatMessage, ContextChange, EpisodeFinished, Task
from fleetbus_workers.environment.base import Ahead, Start, Step, TurnLimits
from fleetbus_workers.environment.validation import InvalidReturn, validate_return
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.virtual_time import virtual_time
from tests.system.test_turns_side_by_side import MOVED, TURNS, Helpers, Round, Slow

anyio_backend = virtual_time

ANYTHING: Any = "anything"
SHOWN = (ChatMessage(role="user", content="go"),)


class Asked(Round):
    """Tells by being asked, whatever ``answer`` says."""

    asks_ahead = True
    answer: Callable[[], Awaitable[Any]]

    @staticmethod
    def _tell(number: int) -> tuple[Ahead, ...]:
        return ()

    async def ask_ahead(self) -> Ahead | None:
        return await type(self).answer()


class Raises(Asked):
    @staticmethod
    async def answer() -> Any:
        raise RuntimeError("no telling")


class TellsText(Asked):
    @staticmethod
    async def answer() -> Any:
        return ANYTHING


class WaitsForEver(Asked):
    answer = staticmethod(anyio.sleep_forever)


class Ends(Round):
    """Is over before what it told."""

    async def step(self, action: Action) -> Step:
        return msgspec.structs.replace(await super().step(action), terminated=self._played == 2)


class AnotherSeat(Round):
    """Told b, c and d; asks for c, then b."""

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        seat = {"b": "c", "c": "b"}.get(step.seat, step.seat)
        return msgspec.structs.replace(step, seat=seat)


class AnotherContext(Helpers):
    """Told sub-agents, and goes on in one context: the answers to them would be trained as answers in it."""

    async def step(self, action: Action) -> Step:
        return msgspec.structs.replace(await super().step(action), context=None)


class TellsTooMuch(Round):
    """Turns that there is no room for, long after those that it asks."""

    @staticmethod
    def _tell(number: int) -> tuple[Ahead, ...]:
        more = tuple(Ahead(messages=SHOWN, seat="d") for _ in range(100))
        return Round._tell(number) + more if number == 2 else Round._tell(number)


async def play(make: Callable[[], Round], *, seconds: float = 0.0) -> EpisodeFinished:
    limits = msgspec.structs.replace(PATIENT, action=seconds or PATIENT.action)
    configuration = build_configuration(limits=limits, environment=EnvironmentSettings(slots=8))
    async with small_deployment(configuration) as fleet:
        await fleet.heard(fleet.environment("e1", make=make), *(fleet.inference(n, sampler=Slow()) for n in ("i1", "i2")))
        await anyio.sleep(5)
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}), sampling=MOVED)
        result = await fleet.result("e")
        await check_one_action_per_turn(fleet)
        report = await audit_run(fleet.bus, fleet.subjects)
        assert not report.findings, report.findings
        await fleet.request("next", task=Task(key="task", prompt="play", config={"turns": 1}), sampling=MOVED)
        await fleet.result("next")  # the worker goes on
        await anyio.sleep(5)
        assert fleet.beats["e1"].in_flight == fleet.beats["i1"].in_flight == fleet.beats["i2"].in_flight == 0
    return result


@pytest.mark.parametrize(
    ("make", "error_class", "said"),
    [
        (Raises, "RuntimeError", "no telling"),
        (TellsText, "InvalidReturn", "ask_ahead returned str 'anything'; it must return Ahead"),
        (AnotherSeat, "told_ahead", "turn 1 shows something else than was told ahead"),
        (AnotherContext, "told_ahead", "turn 1 is not in the context that was told ahead"),
    ],
)
async def test_what_is_told_wrongly_ends_its_episode_in_one_line(make: type[Round], error_class: str, said: str) -> None:
    result = await play(lambda: make(lambda _: None))
    assert (result.outcome, result.error_class) == ("env_failed", error_class), result.error
    assert said in result.error and "\n" not in result.error


@pytest.mark.parametrize("make", [WaitsForEver, TellsTooMuch, Ends])
async def test_what_is_told_and_never_asked_changes_nothing(make: type[Round]) -> None:
    result = await play(lambda: make(lambda _: None))
    assert (result.outcome, result.turns) == ("completed", 2 if make is Ends else TURNS), result.error


async def test_a_policy_that_is_late_ends_an_episode_that_waits_for_more_turns() -> None:
    result = await play(lambda: WaitsForEver(lambda _: None), seconds=0.5)
    assert (result.outcome, result.error_class) == ("timeout", "action_timeout"), result.error


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"context": ANYTHING}, "context must be a ContextChange, not str 'anything'"),
        ({"context": ContextChange(keep_turns=1, resume=0)}, "context has keep_turns and resume"),
        ({"context": ContextChange(), "messages": ()}, "context begins a new prompt, and"),
        ({"limits": ANYTHING}, "limits must be TurnLimits, not str 'anything'"),
        ({"limits": TurnLimits(stop=ANYTHING)}, "limits: Expected `array`"),
    ],
)
@pytest.mark.parametrize("kind", [Start, Step])
def test_what_is_told_is_checked_field_by_field(fields: dict[str, Any], said: str, kind: type[Start | Step]) -> None:
    returned = kind(messages=SHOWN, ahead=(Ahead(**{"messages": SHOWN, **fields}),))
    with pytest.raises(InvalidReturn, match=said) as raised:
        validate_return(kind, returned, "call")
    assert f"{kind.__name__}.ahead[0]" in str(raised.value)
