"""The bus in memory beside a real server: whatever is done to both, in any order, both answer the same.

Publishing with and without compare-and-set and message ids, pulling by credits, acking, purging, and every way of reading.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import ConsumerPlan, RunPlan, StreamPlan, lane_stream, log_stream
from fleetbus.errors import SequenceConflict
from fleetbus_schemas import Subjects

EPISODES = st.sampled_from(["a", "b", "c"])
PAYLOADS = st.binary(max_size=8)
MESSAGE_IDS = st.none() | st.sampled_from(["m1", "m2", "m3"])


def plan(run: str, subjects: Subjects) -> RunPlan:
    return RunPlan(
        run=run,
        log=StreamPlan(name=log_stream(run), subjects=(subjects.log,), duplicate_window_seconds=60.0),
        lanes=StreamPlan(name=lane_stream(run), subjects=(subjects.lanes,), max_per_subject=1),
        consumers=(ConsumerPlan(name="work", filter=subjects.tasks("pool"), ack_wait_seconds=60.0),),
    )


def machine_on(url: str, portal: Any) -> type[RuleBasedStateMachine]:
    """The machine's class, for one server."""

    class TwoBuses(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            run = f"t{secrets.token_hex(6)}"
            self.subjects = Subjects(run)
            self.stack = ExitStack()
            memory = MemoryServer().connect(run)
            self.buses: list[Bus] = [
                self.stack.enter_context(portal.wrap_async_context_manager(each))
                for each in (memory, connect(url, run=run, role="test"))
            ]
            for bus in self.buses:
                portal.call(bus.declare, plan(run, self.subjects))
            self.pulls = [
                self.stack.enter_context(portal.wrap_async_context_manager(bus.pull("work", credits=0))) for bus in self.buses
            ]
            self.undelivered = 0

        def teardown(self) -> None:
            self.stack.close()

        def both(self, ask: Any) -> Any:
            """The answer of both buses; they have to agree."""
            memory, nats = (portal.call(ask, bus) for bus in self.buses)
            assert memory == nats
            return memory

        @rule(episode=EPISODES, payload=PAYLOADS, message_id=MESSAGE_IDS)
        def publish(self, episode: str, payload: bytes, message_id: str | None) -> None:
            async def ask(bus: Bus) -> Any:
                published = await bus.publish(self.subjects.episode(episode), payload, message_id=message_id)
                return published.sequence, published.duplicate

            self.both(ask)

        @rule(episode=EPISODES, payload=PAYLOADS, expected=st.integers(0, 30))
        def publish_expecting(self, episode: str, payload: bytes, expected: int) -> None:
            async def ask(bus: Bus) -> Any:
                try:
                    return (await bus.publish(self.subjects.episode(episode), payload, expected_last=expected)).sequence
                except SequenceConflict:
                    return "refused"

            self.both(ask)

        @rule(episode=EPISODES, payload=PAYLOADS)
        def publish_after_the_last(self, episode: str, payload: bytes) -> None:
            async def ask(bus: Bus) -> Any:
                last = await bus.last(self.subjects.episode(episode))
                expected = last.sequence if last else 0
                return (await bus.publish(self.subjects.episode(episode), payload, expected_last=expected)).sequence

            self.both(ask)

        @rule(name=EPISODES)
        def request_work(self, name: str) -> None:
            async def ask(bus: Bus) -> Any:
                return (await bus.publish(self.subjects.task("pool", name), b"work")).sequence

            self.both(ask)
            self.undelivered += 1

        @rule(acked=st.booleans())
        def take_work(self, acked: bool) -> None:
            if not self.undelivered:
                return

            async def take(pull: Any) -> Any:
                pull.grant(1)
                delivery = await pull.receive()
                if acked:
                    await delivery.ack()
                return delivery.message.sequence, delivery.message.subject, delivery.delivered

            memory, nats = (portal.call(take, pull) for pull in self.pulls)
            assert memory == nats
            self.undelivered -= 1

        @rule(episode=EPISODES, below=st.integers(1, 30))
        def purge(self, episode: str, below: int) -> None:
            async def ask(bus: Bus) -> None:
                await bus.purge(self.subjects.episode(episode), below=below)

            self.both(ask)

        @rule(start=st.integers(1, 30))
        def scan(self, start: int) -> None:
            async def ask(bus: Bus) -> Any:
                return [
                    (entry.sequence, entry.subject, entry.payload) async for entry in bus.scan([self.subjects.log], start=start)
                ]

            self.both(ask)

        @rule(start=st.integers(1, 30))
        def next_entry(self, start: int) -> None:
            async def ask(bus: Bus) -> Any:
                entry = await bus.next_entry(self.subjects.episodes, start=start)
                return entry and (entry.sequence, entry.subject, entry.payload)

            self.both(ask)

        @invariant()
        def what_can_be_read_is_the_same(self) -> None:
            async def ask(bus: Bus) -> Any:
                subjects = [self.subjects.episode(episode) for episode in "abc"]
                history = [(entry.sequence, entry.subject, entry.payload) for entry in await bus.history(subjects)]
                last = [entry and entry.sequence for entry in [await bus.last(subject) for subject in subjects]]
                return history, last, (await bus.log_state()).last_sequence

            self.both(ask)

    return TwoBuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_is_done_to_both_buses_they_answer_the_same(tmp_path: Path) -> None:
    with start_blocking_portal("asyncio") as portal:
        with portal.wrap_async_context_manager(run_server(tmp_path, monitor_port=None)) as server:
            run_state_machine_as_test(
                machine_on(server.url, portal),
                settings=settings(
                    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
                ),
            )
