"""Leases: what is worked on stays ours however long it takes, what was taken from us is left alone, lanes have one holder."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.memory_faults import NO_PUBLISH_FAULT, Faults, PublishFault
from fleetbus.bus.streams import TASK_LEASE_SECONDS, plan_run
from fleetbus.config.settings import LimitSettings
from fleetbus.delivery.lanes import LEASE_SECONDS, RENEWED_SECONDS, LaneLost, NoLaneFree, claim_lane
from fleetbus.delivery.leases import Leases
from fleetbus_schemas import Action, Subjects, Task, decode
from fleetbus_schemas.lifecycle import LaneLease
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

LONG_SECONDS = 60.0
PATIENT = LimitSettings(step=200, action=200, drain=3)
LINGERING = LimitSettings(step=200, action=200, drain=100)

anyio_backend = virtual_time


class SlowEnvironment(ScriptedEnvironment):
    """A step takes as long as the task says."""

    async def open(self, task: Task) -> None:
        self._seconds = float(task.config.get("seconds", LONG_SECONDS))
        await super().open(task)

    async def step(self, action: Action) -> Step:
        await anyio.sleep(self._seconds)
        return await super().step(action)


class Asked(ScriptedSampler):
    """Takes some seconds and counts how often it was asked."""

    def __init__(self, seconds: float) -> None:
        super().__init__(delay=lambda _: seconds)
        self.times = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.times += 1
        return await super().generate(request)


class Deaf(Faults):
    """What these workers say is lost: publishes on a subject, and every ack, nak and extension."""

    def __init__(self) -> None:
        self.subjects: dict[str, str] = {}
        self.without_acks: set[str] = set()

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        lost = worker in self.subjects and self.subjects[worker] in subject
        return PublishFault(lost="message") if lost else NO_PUBLISH_FAULT

    def loses_ack(self, worker: str, consumer: str) -> bool:
        return worker in self.without_acks


def short(turns: int = 1, seconds: float = LONG_SECONDS) -> Task:
    return Task(key="task", prompt="play", config={"turns": turns, "seconds": seconds})


async def claims_of(fleet: SmallDeployment, episode: str = "e") -> list[str]:
    return [claim.worker for claim in await fleet.claims(episode)]


# Deliveries


class FakeDelivery:
    def __init__(self) -> None:
        self.message = StreamEntry(subject="s", payload=b"", sequence=1, time_ns=0)
        self.delivered = 1
        self.extended_at: list[float] = []

    async def ack(self) -> None: ...
    async def nak(self, delay_seconds: float = 0.0) -> None: ...
    async def extend(self) -> None:
        self.extended_at.append(anyio.current_time())

    def forget_message(self) -> None: ...


async def test_what_is_held_is_extended_until_it_is_taken() -> None:
    leases, first, second = Leases(2.0), FakeDelivery(), FakeDelivery()
    leases.hold("a", first)
    leases.hold("b", second)
    with anyio.move_on_after(7):
        async with anyio.create_task_group() as group:
            group.start_soon(leases.run)
            await anyio.sleep(5)
            assert leases.take("b") is second
    assert first.extended_at == [2, 4, 6]
    assert second.extended_at == [2, 4]
    assert (leases.get("a"), leases.get("b")) == (first, None)


async def test_a_redelivery_takes_the_place_of_the_delivery_before() -> None:
    leases, first, second = Leases(2.0), FakeDelivery(), FakeDelivery()
    leases.hold("a", first)
    leases.hold("a", second)
    assert leases.get("a") is second
    assert leases.take("a") is second
    assert leases.take("a") is None
    assert leases.get("a") is None


class Stopped(FakeDelivery):
    """The process is stopped for a while when this is extended for the second time."""

    async def extend(self) -> None:
        await super().extend()
        if len(self.extended_at) == 2:
            await anyio.sleep(30)


async def test_what_was_held_while_the_process_was_stopped_is_not_extended_until_it_is_delivered_again() -> None:
    """Somebody else has it by then: who waits for that one's end would have to wait for this one's, too."""
    leases, first, second, again = Leases(2.0, 8.0), Stopped(), FakeDelivery(), FakeDelivery()
    leases.hold("a", first)
    leases.hold("b", second)
    with anyio.move_on_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(leases.run)
            await anyio.sleep(45)
            leases.hold("a", again)
    assert (first.extended_at, second.extended_at) == ([2, 4], [2])
    assert again.extended_at == [46, 48, 50][: len(again.extended_at)] != []
    assert leases.take("b") is second, "it is still acked at the end"


async def test_an_episode_much_longer_than_its_lease_is_played_once() -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            for index in range(2):
                fleet.environment(f"environment-{index}", make=SlowEnvironment)
            fleet.inference("inference-0")
            await fleet.request(task=short(3))
            result = await fleet.result()
            assert (result.outcome, result.attempts) == ("completed", 1)
            assert result.timings["step"] > 10 * TASK_LEASE_SECONDS
            await fleet.check_at_rest()


async def test_a_turn_much_longer_than_its_lease_is_sampled_once() -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            engines = [Asked(LONG_SECONDS), Asked(LONG_SECONDS)]
            fleet.environment("environment-0")
            for index, engine in enumerate(engines):
                fleet.inference(f"inference-{index}", sampler=engine)
            await fleet.request(task=short(2))
            assert (await fleet.result()).outcome == "completed"
            assert sum(engine.times for engine in engines) == 2
            await fleet.check_at_rest()


async def test_extensions_that_are_lost_on_the_way_cost_a_takeover_and_nothing_else() -> None:
    faults = Deaf()
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT), faults=faults) as fleet:
            faults.without_acks = {"environment-0"}
            await fleet.heard(fleet.environment("environment-0", make=SlowEnvironment), fleet.inference("inference-0"))
            await fleet.request(task=short())
            await anyio.sleep(1)
            fleet.environment("environment-1", make=SlowEnvironment)
            result = await fleet.result()
            assert (result.outcome, result.worker) == ("completed", "environment-1")
            assert await claims_of(fleet) == ["environment-0", "environment-1"]


# What was taken from us is left alone


async def test_a_draining_worker_takes_no_request_away_from_whoever_has_taken_it_over() -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            await fleet.heard(fleet.environment("environment-2", make=SlowEnvironment, slots=1), fleet.inference("inference-0"))
            await fleet.request("filler", task=short(seconds=30))
            await anyio.sleep(1)
            late = fleet.environment("environment-0", make=SlowEnvironment)
            await fleet.request(task=short(seconds=100))
            await anyio.sleep(1)
            await fleet.heard(fleet.environment("environment-1", make=SlowEnvironment, slots=1))
            late.cut()
            await anyio.sleep(TASK_LEASE_SECONDS + 1)
            assert await claims_of(fleet) == ["environment-0", "environment-1"]
            await fleet.result("filler")
            late.drain.set()
            late.mend()
            await late.ended.wait()
            assert late.error is None
            assert (await fleet.result()).worker == "environment-1"
            assert await claims_of(fleet) == ["environment-0", "environment-1"], "it was taken over from a living worker"


async def test_an_entry_behind_a_claim_that_is_no_message_takes_no_episode_from_its_worker() -> None:
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0", make=SlowEnvironment)
            fleet.inference("inference-0")
            await fleet.request(task=short())
            await anyio.sleep(1)
            await fleet.bus.publish(fleet.subjects.episode("e"), b"\xc1")
            result = await fleet.result()
            assert (result.outcome, result.attempts) == ("completed", 1)
            await fleet.check_at_rest()


async def test_a_worker_whose_claim_went_unanswered_takes_no_request_away_from_whoever_has_claimed_since() -> None:
    faults = Deaf()
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=LINGERING), faults=faults) as fleet:
            late = fleet.environment("environment-0", make=SlowEnvironment)
            await fleet.heard(late, fleet.inference("inference-0"))
            faults.subjects = {"environment-0": ".episode."}
            faults.without_acks = {"environment-0"}
            await fleet.request(task=short())
            late.drain.set()
            await anyio.sleep(2.3)  # so that no extension falls between the nak and its delay
            await fleet.heard(fleet.environment("environment-1", make=SlowEnvironment, slots=1))
            await anyio.sleep(TASK_LEASE_SECONDS)
            faults.without_acks.clear()
            await fleet.heard(fleet.environment("environment-2", make=SlowEnvironment))
            await anyio.sleep(31.6 - anyio.current_time())
            await fleet.request("another", task=short(seconds=1))  # the server in memory looks when something happens
            assert (await fleet.result()).worker == "environment-1"
            assert await claims_of(fleet) == ["environment-1"], "it was taken over from a living worker"


async def test_a_request_whose_claim_went_unanswered_is_given_back_when_nobody_holds_the_episode() -> None:
    faults = Deaf()
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=LINGERING), faults=faults) as fleet:
            fleet.inference("inference-0")
            late = fleet.environment("environment-0")
            await fleet.heard(late)
            faults.subjects = {"environment-0": ".episode."}
            await fleet.request(task=short())
            await anyio.sleep(1)
            late.drain.set()
            await anyio.sleep(28)
            await fleet.heard(fleet.environment("environment-1"))
            asked_at = anyio.current_time()
            await anyio.sleep(3)
            await fleet.request("another", task=short())  # the server in memory looks for what is due when something happens
            assert (await fleet.result()).outcome == "completed"
            assert fleet.finished_at["e"] - asked_at < 5, "it waited for its lease"
            await fleet.check_at_rest()


async def test_a_worker_that_is_past_its_drain_begins_nothing_any_more() -> None:
    """Its look at the log was held up until after the time for handing back."""
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            late = fleet.environment("environment-0", make=SlowEnvironment)
            await fleet.heard(late, fleet.inference("inference-0"))
            late.cut()
            await fleet.request(task=short())
            late.mend()  # the request is on its way to the worker ...
            late.cut()  # ... and the worker cannot look the episode up
            await anyio.sleep(1)
            late.drain.set()
            await anyio.sleep(10)
            late.mend()
            fleet.environment("environment-1")
            assert (await fleet.result()).worker == "environment-1"
            await late.ended.wait()
            assert late.error is None
            assert await claims_of(fleet) == ["environment-1"]


# What an engine cannot even begin


class RefusingTemplate(ScriptedTemplate):
    """As a chat template that cannot render these roles or this image."""

    def encode_prompt(self, messages: Any, tools: Any) -> list[int]:
        if "unspeakable" in str(messages):
            raise LookupError("no such role")
        return super().encode_prompt(messages, tools)


async def test_an_observation_that_the_template_refuses_ends_its_episode_and_not_the_worker() -> None:
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            engine = fleet.inference("inference-0", template=RefusingTemplate())
            fleet.environment("environment-0")
            await fleet.request("bad", task=Task(key="task", prompt="unspeakable"))
            await fleet.request("good")
            bad, good = await fleet.result("bad"), await fleet.result("good")
            assert (bad.outcome, bad.error_class) == ("lost", "template_failed")
            assert "no such role" in bad.error
            assert good.outcome == "completed"
            assert not engine.ended.is_set()
            await fleet.check_at_rest()


# Lanes


async def declared(server: MemoryServer) -> Subjects:
    async with server.connect(RUN, worker="declares") as bus:
        await bus.declare(plan_run(RUN, lanes=2))
    return Subjects(RUN)


async def test_a_lane_has_one_holder_and_is_free_again_when_its_lease_runs_out_or_is_released() -> None:
    server = MemoryServer()
    subjects = await declared(server)
    async with server.connect(RUN, worker="w") as bus:

        async def claim(name: str, wait_seconds: float = 0.5) -> Any:
            return await claim_lane(
                bus, subjects, role="environment", names=["e0", "e1"], worker=name, nonce=name, wait_seconds=wait_seconds
            )

        first, second = await claim("a"), await claim("b")
        assert (first.name, second.name) == ("e0", "e1")
        with pytest.raises(NoLaneFree, match=r"raise nats\.lanes"):
            await claim("c")
        for _ in range(4):  # renewed, a lane outlives its lease
            await anyio.sleep(LEASE_SECONDS / 2)
            await second.renew(bus)
        third = await claim("c", RENEWED_SECONDS + 1.5)
        assert third.name == "e0"
        with pytest.raises(LaneLost):
            await first.renew(bus)
        await first.release(bus)  # what is lost already is nobody's to release
        stored = await bus.last(subjects.lane("environment", "e0"))
        assert stored is not None and decode(LaneLease, stored.payload).worker == "c"
        await second.release(bus)
        assert (await claim("d")).name == "e1"


async def test_whoever_waits_for_a_lane_gets_it_when_its_holder_is_gone() -> None:
    server = MemoryServer()
    subjects = await declared(server)
    async with server.connect(RUN, worker="w") as bus:
        for name in ("a", "b"):
            await claim_lane(bus, subjects, role="inference", names=["i0", "i1"], worker=name, nonce=name)
        started = anyio.current_time()
        lane = await claim_lane(bus, subjects, role="inference", names=["i0", "i1"], worker="c", nonce="c")
        assert lane.name == "i0"
        assert LEASE_SECONDS < anyio.current_time() - started <= LEASE_SECONDS + 1.5


@pytest.mark.parametrize("lost", ["message", "answer"])
async def test_a_renewal_that_is_lost_on_the_way_loses_no_lane(lost: Any) -> None:
    class Once(Faults):
        left = 1

        def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
            self.left -= "fblane" in subject
            return PublishFault(lost=lost) if self.left == -1 and "fblane" in subject else NO_PUBLISH_FAULT

    server = MemoryServer(faults=Once())
    subjects = await declared(server)
    async with server.connect(RUN, worker="w") as bus:
        lane = await claim_lane(bus, subjects, role="environment", names=["e0"], worker="a", nonce="a")
        for _ in range(3):
            await lane.renew(bus)
            await anyio.sleep(2)
        stored = await bus.last(lane.subject)
        assert stored is not None and stored.sequence == lane.sequence


async def test_a_lane_with_an_unreadable_lease_is_free() -> None:
    server = MemoryServer()
    subjects = await declared(server)
    async with server.connect(RUN, worker="w") as bus:
        await bus.publish(subjects.lane("environment", "e0"), b"nonsense")
        assert (await claim_lane(bus, subjects, role="environment", names=["e0"], worker="a", nonce="a")).name == "e0"
