"""Features of the in-memory bus alone: faults to order, virtual time, and the same trace every time."""

from __future__ import annotations

import hashlib
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import trio.testing

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.memory import EPOCH_NS, Faults, MemoryBus, MemoryServer
from fleetbus.bus.memory_faults import DeliveryFault, PublishFault
from fleetbus.bus.memory_subjects import SubjectIndex, any_matcher, matcher
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus.errors import BusError, PublishUnanswered, RequestUnanswered, SequenceConflict, UserError
from fleetbus_schemas import Subjects
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("r")
CONSUMER = tasks_consumer("default")

anyio_backend = virtual_time


def ready(server: MemoryServer, **settings: Any) -> MemoryServer:
    server.declare(plan_run("r", lanes=2, **settings))
    return server


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "ab.c", False),
        ("a.*.>", "a.b.c", True),
        ("a.*.>", "a.b", False),
        (">", "a", True),
    ],
)
def test_patterns_match_as_nats_matches_them(pattern: str, subject: str, expected: bool) -> None:
    assert matcher(pattern)(subject) is expected
    assert any_matcher([pattern])(subject) is expected
    index: SubjectIndex[str] = SubjectIndex()
    index.add(pattern, "key", "value")
    assert index.find(subject) == (["value"] if expected else [])
    index.remove(pattern, "key")
    assert index.find(subject) == []


def test_an_index_finds_in_order_of_addition() -> None:
    index: SubjectIndex[int] = SubjectIndex()
    for number, pattern in enumerate(["a.>", "a.b", "*.b", ">", "a.b"]):
        index.add(pattern, number, number)
    assert index.find("a.b") == [0, 1, 2, 3, 4]


def test_the_memory_bus_is_a_bus() -> None:
    bus: type[Bus] = MemoryBus
    assert bus is MemoryBus


async def test_time_is_the_epoch_plus_the_virtual_clock() -> None:
    async with ready(MemoryServer()).connect("r") as bus:
        begun = bus.now_ns()
        await anyio.sleep(3600)
        stored = await bus.publish(SUBJECTS.episode("e1"), b"x")
        entry = await bus.last(SUBJECTS.episode("e1"))
        assert begun >= EPOCH_NS
        assert bus.now_ns() - begun == 3600 * 10**9
        assert entry is not None
        assert (entry.sequence, entry.time_ns) == (stored.sequence, bus.now_ns())


async def test_a_dead_server_refuses_connects_after_a_while() -> None:
    server = MemoryServer()
    server.kill()
    with pytest.raises(UserError):
        async with server.connect("r"):
            pass


async def test_an_unplanned_run_is_an_error() -> None:
    async with MemoryServer().connect("r") as bus:
        with pytest.raises(BusError, match="fb_r"):
            await bus.log_state()
        with pytest.raises(BusError, match="fb_r"):
            async with bus.read([SUBJECTS.log]) as reading:
                await reading.receive()


class Lossy(Faults):
    """Each answer is one list of faults, used up from the front."""

    def __init__(self) -> None:
        self.publishes: list[PublishFault] = []
        self.deliveries: list[DeliveryFault] = []
        self.acks: list[bool] = []
        self.calls: list[float | None] = []

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        return self.publishes.pop(0) if self.publishes else PublishFault()

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        return self.deliveries.pop(0) if self.deliveries else DeliveryFault()

    def loses_ack(self, worker: str, consumer: str) -> bool:
        return self.acks.pop(0) if self.acks else False

    def draw_call_delay(self, worker: str, subject: str) -> float | None:
        return self.calls.pop(0) if self.calls else 0.0


async def test_a_lost_message_is_sent_again_and_a_lost_answer_makes_a_duplicate() -> None:
    faults = Lossy()
    async with ready(MemoryServer(faults=faults)).connect("r") as bus:
        faults.publishes = [PublishFault(lost="message")]
        assert not (await bus.publish(SUBJECTS.episode("e1"), b"x")).duplicate
        faults.publishes = [PublishFault(lost="answer")]
        assert (await bus.publish(SUBJECTS.episode("e2"), b"x")).duplicate
        assert (await bus.log_state()).last_sequence == 2


async def test_without_a_duplicate_window_a_lost_answer_makes_a_conflict_with_oneself() -> None:
    faults = Lossy()
    async with ready(MemoryServer(faults=faults), duplicate_window_seconds=0.0).connect("r") as bus:
        faults.publishes = [PublishFault(lost="answer")]
        with pytest.raises(SequenceConflict):
            await bus.publish(SUBJECTS.episode("e1"), b"mine", expected_last=0)
        entry = await bus.last(SUBJECTS.episode("e1"))
        assert entry is not None
        assert entry.payload == b"mine"


async def test_a_message_under_way_when_the_server_dies_is_not_stored_twice() -> None:
    faults = Lossy()
    server = ready(MemoryServer(faults=faults))
    faults.publishes = [PublishFault(seconds_before=1.0), PublishFault(seconds_after=1.0)]
    async with server.connect("r") as bus:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for name in ("before", "after"):
                    tasks.start_soon(bus.publish, SUBJECTS.episode(name), b"x")
                await anyio.sleep(0.5)
                assert (await bus.log_state()).last_sequence == 1
                server.kill()
                server.restart()
        assert (await bus.log_state()).last_sequence == 2


async def test_deliveries_can_be_late_lost_or_repeated() -> None:
    faults = Lossy()
    async with ready(MemoryServer(faults=faults)).connect("r") as bus:
        for number in range(3):
            await bus.publish(SUBJECTS.task("default", f"e{number}"), b"%d" % number)
        faults.deliveries = [DeliveryFault(seconds=2.0), DeliveryFault(lost=True), DeliveryFault(repeated=True)]
        async with bus.pull(CONSUMER, credits=9) as subscription:
            arrived = []
            for _ in range(4):
                delivery = await subscription.receive()
                arrived.append((delivery.message.payload, delivery.delivered))
                await delivery.ack()
    # 2 and its repetition, then 0 which was under way for two seconds, then 1 after its lease
    assert arrived == [(b"2", 1), (b"2", 2), (b"0", 1), (b"1", 2)]


async def test_a_lost_ack_means_redelivery() -> None:
    faults = Lossy()
    async with ready(MemoryServer(faults=faults)).connect("r") as bus, bus.pull(CONSUMER, credits=2) as subscription:
        await bus.publish(SUBJECTS.task("default", "e1"), b"x")
        faults.acks = [True]
        first = await subscription.receive()
        await first.ack()
        again = await subscription.receive()
        assert (again.message, again.delivered) == (first.message, 2)


async def test_a_killed_server_forgets_as_many_acks_as_it_is_told() -> None:
    for forgotten in (0, 2, 5):
        server = ready(MemoryServer())
        async with server.connect("r") as bus, bus.pull(CONSUMER, credits=20) as subscription:
            for number in range(5):
                await bus.publish(SUBJECTS.task("default", f"e{number}"), b"x")
            for _ in range(4):
                await (await subscription.receive()).ack()
            held = await subscription.receive()
            server.kill(forgotten_acks=forgotten)
            server.restart()
            again: list[Any] = []
            with anyio.move_on_after(1):
                while True:
                    again.append(await subscription.receive())
        expected = [*range(max(1, 5 - forgotten), 5), held.message.sequence]
        assert [delivery.message.sequence for delivery in again] == expected
        assert {delivery.delivered for delivery in again} == {1}


async def test_a_disconnected_client_loses_its_leases_and_reaches_nobody() -> None:
    server = ready(MemoryServer())
    async with server.connect("r") as one, server.connect("r") as other:
        async with one.pull(CONSUMER, credits=1) as mine, other.pull(CONSUMER, credits=1) as theirs:
            await other.publish(SUBJECTS.task("default", "e1"), b"x")
            held = await mine.receive()
            one.disconnect()
            with pytest.raises(PublishUnanswered):
                await one.publish(SUBJECTS.episode("e1"), b"x", timeout=1)
            with pytest.raises(RequestUnanswered):
                await one.request("fbrpc.r.w.s", b"x", timeout=1)
            await held.ack()
            taken = await theirs.receive()
            assert (taken.message, taken.delivered) == (held.message, 2)
            one.reconnect()
            assert (await one.publish(SUBJECTS.episode("e1"), b"x")).sequence == 2


async def test_a_crashed_worker_hands_nothing_back() -> None:
    server = ready(MemoryServer())
    async with server.connect("r") as bus:
        await bus.publish(SUBJECTS.task("default", "e1"), b"x")
        async with server.connect("r") as crashing, crashing.pull(CONSUMER, credits=1):
            await anyio.sleep(1)
            crashing.disconnect()
        begun = anyio.current_time()
        async with bus.pull(CONSUMER, credits=1) as subscription:
            assert (await subscription.receive()).delivered == 2
        assert anyio.current_time() - begun >= 8


async def test_core_messages_can_be_late_or_lost() -> None:
    faults = Lossy()
    async with MemoryServer(faults=faults).connect("r") as bus, bus.listen("fbhb.r.>") as listener:
        faults.calls = [None, 2.0]
        await bus.broadcast("fbhb.r.x", b"lost")
        begun = anyio.current_time()
        await bus.broadcast("fbhb.r.x", b"late")
        assert await listener.receive() == ("fbhb.r.x", b"late")
        assert anyio.current_time() - begun == 2.0


class Seeded(Faults):
    """A bit of everything, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draw_publish_fault(self, worker: str, subject: str) -> PublishFault:
        lost = self.random.choice(("", "", "", "message", "answer"))
        return PublishFault(seconds_before=self.random.random(), lost=lost)  # type: ignore[arg-type]

    def draw_delivery_fault(self, worker: str, consumer: str, subject: str) -> DeliveryFault:
        kind = self.random.random()
        return DeliveryFault(seconds=self.random.random(), lost=kind < 0.1, repeated=kind > 0.9)

    def loses_ack(self, worker: str, consumer: str) -> bool:
        return self.random.random() < 0.1


def _trace(seed: int) -> tuple[str, set[str], int]:
    """Three workers answer forty tasks under faults; the hash of the log, the tasks answered, and deliveries in all."""
    trio._core._run._r.seed(seed)  # type: ignore[attr-defined]  # trio shuffles what is ready; nothing public seeds it
    entries: list[StreamEntry] = []
    deliveries = 0

    async def work(bus: MemoryBus, done: anyio.Event) -> None:
        nonlocal deliveries
        async with bus.pull(CONSUMER, credits=3) as subscription:
            while not done.is_set():
                delivery = None
                with anyio.move_on_after(5):
                    delivery = await subscription.receive()
                if delivery is None:
                    continue
                deliveries += 1
                with suppress(SequenceConflict):
                    episode = delivery.message.subject.rpartition(".")[2]
                    await bus.publish(SUBJECTS.episode(episode), b"done", expected_last=0)
                await delivery.ack()
                subscription.grant()

    async def main() -> None:
        server = ready(MemoryServer(faults=Seeded(seed)))
        done = anyio.Event()
        async with AsyncExitStack() as stack, server.connect("r") as bus, anyio.create_task_group() as tasks:
            for number in range(3):
                worker = await stack.enter_async_context(server.connect("r", worker=f"w{number}"))
                tasks.start_soon(work, worker, done)
            for number in range(40):
                tasks.start_soon(bus.publish, SUBJECTS.task("default", f"e{number}"), b"x")
            async with bus.read([SUBJECTS.episodes]) as reading:
                entries.extend([await reading.receive() for _ in range(40)])
            done.set()

    async def bounded() -> None:
        with anyio.fail_after(3600):
            await main()

    anyio.run(bounded, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})
    digest = hashlib.sha256(repr([(entry.subject, entry.sequence, entry.time_ns) for entry in entries]).encode()).hexdigest()
    return digest, {entry.subject for entry in entries}, deliveries


def test_the_same_seed_gives_the_same_trace_and_no_task_is_lost_or_doubled() -> None:
    for seed in range(4):
        digest, subjects, deliveries = _trace(seed)
        assert _trace(seed) == (digest, subjects, deliveries)
        assert len(subjects) == 40
        assert deliveries > 40
    assert len({_trace(seed)[0] for seed in range(4)}) == 4


@pytest.mark.parametrize("subject", [SUBJECTS.episode("new"), SUBJECTS.life("learner", "l")], ids=["its own", "another"])
async def test_a_reader_whose_last_entry_was_lost_is_told_whatever_stands_there_now(subject: str) -> None:
    server = ready(MemoryServer())
    async with server.connect("r") as bus, server.connect("r") as other, bus.read([SUBJECTS.episodes]) as reading:
        await other.publish(SUBJECTS.episode("kept"), b"x")
        await reading.receive()
        files = server.copy_files()
        await other.publish(SUBJECTS.episode("lost"), b"x")
        await reading.receive()
        server.kill()
        server.put_back(files)
        server.restart()
        await other.publish(subject, b"x")
        with anyio.fail_after(30), pytest.raises(BusError, match=r"entry 2 of the log was read before, and is not there"):
            await reading.receive()


async def test_a_reader_of_a_connection_whose_own_entry_was_lost_is_told_although_it_lost_nothing_that_it_read() -> None:
    """A learner's version, say, which nobody would publish again."""
    server = ready(MemoryServer())
    async with server.connect("r") as bus, bus.read([SUBJECTS.episodes]) as reading, server.connect("r") as other:
        await bus.publish(SUBJECTS.episode("kept"), b"x")
        await reading.receive()
        files = server.copy_files()
        await bus.publish(SUBJECTS.policy("default"), b"version 1")
        server.kill()
        server.put_back(files)
        server.restart()
        await other.publish(SUBJECTS.episode("new"), b"x")
        await bus.publish(SUBJECTS.life("learner", "l"), b"what it stores next hides nothing")
        with anyio.fail_after(30), pytest.raises(BusError, match="entry 2 of the log was stored before, and is not there"):
            await reading.receive()


async def test_a_reader_is_told_of_what_was_stored_and_lost_between_two_losses_although_nobody_looked_between_them() -> None:
    server = ready(MemoryServer())
    async with server.connect("r") as bus, bus.read([SUBJECTS.episodes]) as reading, server.connect("r") as other:
        await bus.publish(SUBJECTS.policy("default"), b"version 1")
        server.kill()
        server.restart()
        files = server.copy_files()
        await bus.publish(SUBJECTS.policy("default"), b"version 2")
        server.kill()
        server.put_back(files)
        server.restart()
        await other.publish(SUBJECTS.episode("new"), b"x")
        with anyio.fail_after(30), pytest.raises(BusError, match="entry 2 of the log was stored before, and is not there"):
            await reading.receive()
