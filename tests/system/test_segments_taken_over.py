"""Workers killed in the midst of an episode of several segments: at every point of it, what is trained in the end is, id by id,
what is trained of an episode that nobody disturbed.

In virtual time at every single turn; on a real server once per role. Real processes: `benchmarks/chaos.py --segments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.seats import parse_seats
from fleetbus.config.settings import EpisodeSettings, RunSettings
from fleetbus.core.training.groups import Group
from fleetbus_schemas import Action, ContextChange, EpisodeFinished, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from tests.support.interrupted_deployment import PATIENT, check_one_action_per_turn
from tests.support.servers import connect, run_server
from tests.support.small_deployment import RUN, Connect, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

pytestmark = pytest.mark.integration

anyio_backend = virtual_time

ENVIRONMENTS = ("environment-0", "environment-1")
ENGINES = ("inference-0", "inference-1")
TURNS = 9
CHANGES = {
    1: ContextChange(keep_turns=1),
    3: ContextChange(reason="sub_agent"),
    5: ContextChange(resume=1),
    6: ContextChange(keep_turns=2),
}
"""By the number of steps before it: turns 0 and 1 are segment 0, then 2, 3, 6 of 1, 4 and 5 of 2, 7 and 8 of 3."""

Trained = list[tuple[int, list[int], list[bool], list[float]]]


class Forest(ScriptedEnvironment):
    """Its contexts change now and then; ``stepped`` hears the number of each step before its observation goes out."""

    def __init__(self, stepped: Callable[[int], None] = lambda _: None, *, changes: dict[int, ContextChange] = CHANGES) -> None:
        super().__init__(TURNS)
        self._stepped = stepped
        self._changes = changes

    async def open(self, task: Task) -> None:
        await super().open(task)
        self._stepped(0)

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        self._stepped(self._played)
        return Step(messages=step.messages, terminated=step.terminated, context=self._changes.get(self._played - 1))


class Rebuilt(Forest):
    """Its steps cannot be repeated: a takeover begins anew."""

    replayable = False


class Watched(ScriptedSampler):
    """Tells of each turn that it is about to answer, half of the time that it takes before it does."""

    def __init__(self, asked: Callable[[int], None]) -> None:
        super().__init__()
        self._asked = asked
        self._turns: dict[int, int] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.sleep(0.2)
        self._asked(request.seed)
        await anyio.sleep(0.2)
        return await super().generate(request)


class Unlearnable(Watched):
    """A model that tells no log-probabilities, and has more tokens than the one that is trained."""

    async def generate(self, request: GenerationRequest) -> Generation:
        assert not request.trained
        generation = await super().generate(request)
        ids = [200_000 + token for token in generation.ids]
        return msgspec.structs.replace(generation, ids=ids, logprobs=[math.nan] * len(ids))


class Rendering(ScriptedTemplate):
    """A template that renders the whole conversation in other tokens than those that were sampled."""

    renders_history = True


class Killer:
    """Kills the worker of ``role`` that is at work when the episode comes to ``point``, once. Turns are known by seed."""

    def __init__(self, role: str, point: tuple[str, int]) -> None:
        self._role = role
        self._point = point
        self._seeds: list[int] = []
        self._environment = ""
        self.fleet: SmallDeployment | None = None
        self.killed = ""

    def stepped(self, name: str, steps: int) -> None:
        self._environment = name
        self._reach("stepped", steps, self._environment)

    def asked(self, name: str, seed: int) -> None:
        if seed not in self._seeds:
            self._seeds.append(seed)
        self._reach("asked", self._seeds.index(seed), name if self._role == "inference" else self._environment)

    def _reach(self, event: str, count: int, name: str) -> None:
        if (event, count) == self._point and not self.killed and self.fleet is not None:
            self.killed = name
            self.fleet.members[name].kill()


async def play(
    killer: Killer | None = None,
    *,
    connected: Connect | None = None,
    make: Callable[..., Forest] = Forest,
    template: ScriptedTemplate | None = None,
    seats: str = "",
    seat_limits: str = "",
) -> tuple[EpisodeFinished, Trained]:
    """One episode among two workers of each role, of which the killer may kill one; its result, and what is trained of it.
    ``seats`` are those of other policies, each of which two more inference workers serve."""
    killer = killer or Killer("", ("", 0))
    episode = EpisodeSettings(seat_limits=seat_limits)
    configuration = build_configuration(limits=PATIENT, run=RunSettings(name=RUN, seats=seats), episode=episode)
    async with small_deployment(configuration, connect=connected) as fleet:
        killer.fleet = fleet
        members = [fleet.environment(name, make=partial(make, partial(killer.stepped, name))) for name in ENVIRONMENTS]
        members += [
            fleet.inference(name, sampler=Watched(partial(killer.asked, name)), template=template or ScriptedTemplate())
            for name in ENGINES
        ]
        for seat in parse_seats(seats):
            for number in range(2):
                name = f"inference-{seat.policy}-{number}"
                members.append(fleet.inference(name, sampler=Unlearnable(partial(killer.asked, name)), policy=seat.policy))
        await fleet.heard(*members)
        await fleet.request("e", task=Task(key="task", prompt="play", config={"turns": TURNS}))
        result = await fleet.result("e")
        group = Group(group_id="g", size=1, results={"e": result})
        sequences = await read_sequences(fleet.bus, fleet.subjects, [group], plan=CreditPlan(), temperature=1.0)
        assert not group.unusable
        await check_one_action_per_turn(fleet)
        report = await audit_run(fleet.bus, fleet.subjects)
        assert not report.findings, report.findings
    trained = [(one.segment, one.ids.tolist(), one.loss_mask.tolist(), one.logprobs.tolist()) for one in sequences]
    return result, trained


def count_trained(trained: Trained) -> int:
    return sum(sum(mask) for _, _, mask, _ in trained)


async def test_a_kill_at_any_point_leaves_the_same_segments_to_train() -> None:
    result, expected = await play()
    assert [(one.first_turn, one.turns) for one in result.segments] == [(0, 2), (2, 3), (4, 2), (7, 2)]
    assert count_trained(expected) == 8 * TURNS, "each sampled token is trained once"
    points = [("environment", ("stepped", step)) for step in range(1, TURNS)]
    points += [(role, ("asked", turn)) for role in ("environment", "inference") for turn in range(TURNS)]
    for role, point in points:
        killer = Killer(role, point)
        disturbed, trained = await play(killer)
        assert killer.killed.startswith(role), (role, point)
        assert (disturbed.outcome, disturbed.segments) == ("completed", result.segments), (role, point, disturbed.error)
        assert disturbed.attempts == (1 if role == "inference" else 2), (role, point)
        assert trained == expected, (role, point)


async def test_an_environment_that_cannot_repeat_its_steps_begins_its_segments_anew() -> None:
    result, expected = await play(make=Rebuilt)
    disturbed, trained = await play(Killer("environment", ("asked", 4)), make=Rebuilt)
    assert (disturbed.attempts, disturbed.segments, trained) == (2, result.segments, expected)


async def test_a_takeover_goes_on_where_the_inference_worker_had_to_begin_segments_of_its_own() -> None:
    make = partial(Forest, changes={})
    result, expected = await play(make=make, template=Rendering())
    assert [one.origin.reason for one in result.segments if one.origin is not None] == ["history_edited"] * (TURNS - 1)
    for role in ("environment", "inference"):
        disturbed, trained = await play(Killer(role, ("asked", 4)), make=make, template=Rendering())
        assert (disturbed.outcome, disturbed.error) == ("completed", ""), role
        assert trained == expected, role


class Forgetful(Forest):
    """Changes its context another time than the attempt before did."""

    opened = 0

    def __init__(self, stepped: Callable[[int], None]) -> None:
        Forgetful.opened += 1
        first = Forgetful.opened == 1
        super().__init__(stepped, changes=CHANGES if first else {**CHANGES, 5: ContextChange(resume=0)})


async def test_a_takeover_that_goes_on_in_another_segment_than_was_recorded_has_diverged() -> None:
    Forgetful.opened = 0
    result, _ = await play(Killer("environment", ("asked", 7)), make=Forgetful)
    assert (result.outcome, result.error_class) == ("lost", "diverged")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("role", ["environment", "inference"])
async def test_a_kill_in_mid_segment_on_a_real_server_loses_nothing(role: str, tmp_path: Path) -> None:
    _, expected = await play()
    async with run_server(tmp_path) as server:
        killer = Killer(role, ("asked", 5))
        with anyio.fail_after(50):
            result, trained = await play(killer, connected=lambda name: connect(server.url, run=RUN, worker=name))
    assert killer.killed.startswith(role)
    assert (result.outcome, trained) == ("completed", expected)
