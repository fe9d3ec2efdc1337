"""The environment worker: pulls requests into free slots, each of which becomes an attempt at an episode.

Above it is the command line; below are the bus, `Attempts` and one `Environment` per episode. It drains on request: takes
nothing new, lets episodes finish, and returns those that do not finish in time.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import structlog

from fleetbus.bus.base import Bus, Delivery
from fleetbus.bus.streams import TASK_LEASE_SECONDS, actions_consumer, environment_lanes, tasks_consumer
from fleetbus.concurrency.compact_tasks import open_compact_task_group
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.pools import list_served_pools
from fleetbus.config.settings import Configuration
from fleetbus.delivery.control import Control
from fleetbus.delivery.lanes import Lane, claim_lane
from fleetbus.delivery.leases import Leases
from fleetbus.delivery.slots import Slots
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus.log.stored_entries import decode_one
from fleetbus_schemas import Action, Heartbeat, MalformedMessage, Subjects
from fleetbus_workers.environment.base import Environment, TaskEnvironmentFactory
from fleetbus_workers.environment.episode.attempts import Attempts
from fleetbus_workers.environment.examples import read_examples
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker_context import WorkerContext

SHARE_AHEAD = 4
"""A worker of several pools asks each for this part of its share of the slots at a time: all pools but one may be idle."""

log = structlog.get_logger()


class Intake(Protocol):
    """Decides which requests a worker takes, where not each will do. ``on_wanted`` is the worker's, to be called when more
    are wanted."""

    on_wanted: Callable[[], None]

    def count_wanted(self) -> int:
        """Number of requests that are wanted at the moment, besides those in work."""

    async def handle(self, delivery: Delivery, play: Callable[[Delivery], Awaitable[None]]) -> None:
        """Have a delivered request played, or return it."""


class EnvironmentWorker:
    """One worker on one lane. ``drain`` set from outside, or by a control request, ends `run` in an orderly way."""

    def __init__(
        self,
        bus: Bus,
        *,
        configuration: Configuration,
        name: str,
        drain: anyio.Event,
        lane: Lane,
        context: WorkerContext,
        on_hosting: Callable[[SessionHost], None] = lambda _: None,
        intake: Intake | None = None,
    ) -> None:
        self._bus = bus
        self._slot_count = configuration.environment.slots
        self._drain_seconds = configuration.limits.drain
        self._pools = list_served_pools(configuration)
        self._subjects = context.subjects
        self._name = name
        self._drain = drain
        self._lane = lane
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._leases = Leases(TASK_LEASE_SECONDS / 4, TASK_LEASE_SECONDS)
        self._attempts = Attempts(context, self._leases, self._counters)
        self._intake = intake
        handle = self._attempts.handle_request if intake is None else self._handle_wanted
        ahead = max(self._slot_count // (SHARE_AHEAD * len(self._pools)), 1) if len(self._pools) > 1 else 0
        self._slots = Slots(bus, handle, demand=intake.count_wanted if intake else None, ahead=ahead)
        if intake is not None:
            intake.on_wanted = self._slots.top_up
        self._session_slots = configuration.environment.session_slots
        self._sessions = SessionHost(context, self._session_slots, self._counters)
        self._on_hosting = on_hosting

    async def run(self) -> None:
        """Work until drained; cancelled, it drops everything, and others take over when the leases run out."""
        bus, subjects = self._bus, self._subjects
        lifecycle = WorkerLifecycle(bus, subjects, role="environment", worker=self._name, beat=self._heartbeat, lane=self._lane)
        control = Control(
            bus,
            subjects,
            role="environment",
            worker=self._name,
            drain=self._drain,
            cancel=self._attempts.cancel,
            busy_with=lambda: (*self._attempts.episodes, *self._sessions.names),
        )
        async with run_lifecycle(lifecycle, bus, self._lane, slots=self._slot_count), anyio.create_task_group() as group:
            group.start_soon(self._leases.run)
            group.start_soon(self._attempts.deadlines.run)
            group.start_soon(self._attempts.watch_late_answers)
            group.start_soon(self._attempts.lane_status.run)
            group.start_soon(control.run)
            group.start_soon(self._receive_actions)
            if self._session_slots:
                await group.start(self._sessions.run)
                self._on_hosting(self._sessions)
                await lifecycle.publish_heartbeat()  # clients that wait for a host need not wait for the next heartbeat
            await self._work(lifecycle)
            group.cancel_scope.cancel()

    async def _handle_wanted(self, delivery: Delivery) -> None:
        assert self._intake is not None
        await self._intake.handle(delivery, self._attempts.handle_request)

    async def _receive_actions(self) -> None:
        """Actions stay in the log, so one is acked as soon as its attempt has it or no attempt waits for it."""
        async with self._bus.pull(actions_consumer(self._lane.name), credits=2 * self._slot_count) as subscription:
            while True:
                delivery = await subscription.receive()
                self._deliver(delivery)
                await delivery.ack()
                subscription.grant(1)

    def _deliver(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            self._attempts.deliver(message.sequence, decode_one(Action, message))
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.warning("action is malformed; ignoring it", reason=str(malformed))

    async def _work(self, lifecycle: WorkerLifecycle) -> None:
        """Pull into free slots until drained; then wait for running episodes and return those that do not end in time."""
        async with open_compact_task_group() as attempts:
            sources = {tasks_consumer(pool): self._slot_count for pool in self._pools}
            await self._slots.run(sources, self._drain, attempts)
            await lifecycle.publish_draining(in_flight=self._slots.in_flight)
            async with anyio.create_task_group() as draining:
                draining.start_soon(self._sessions.drain, self._drain_seconds)
                with anyio.move_on_after(self._drain_seconds):
                    await self._slots.wait_until_idle()
                self._attempts.release_all()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            role="environment",
            worker=self._name,
            slots=self._slot_count,
            in_flight=self._slots.in_flight,
            lane=self._lane.name,
            draining=self._drain.is_set(),
            counters=dict(self._counters),
            session_slots=self._session_slots if self._sessions.serving else 0,
            sessions=self._sessions.open,
            pools=self._pools,
        )


async def run_environment(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    make: Callable[[], Environment] | TaskEnvironmentFactory,
    runtime: Runtime | None = None,
    on_hosting: Callable[[SessionHost], None] = lambda _: None,
    intake: Intake | None = None,
) -> None:
    """An environment worker from claiming a lane to leaving the run. ``make`` makes one environment per episode; ``on_hosting``
    is called when step-wise sessions are served; ``intake`` says which requests are wanted."""
    make_for = make.for_task if isinstance(make, TaskEnvironmentFactory) else lambda _: make()
    runtime = runtime or Runtime()
    subjects = Subjects(configuration.run.name)
    lanes = environment_lanes(configuration.nats.lanes)
    lane = await claim_lane(bus, subjects, role="environment", names=lanes, worker=name, nonce=runtime.nonce())
    context = WorkerContext(
        bus=bus,
        subjects=subjects,
        worker=name,
        lane=lane.name,
        settings=configuration.environment,
        limits=configuration.limits,
        make=make_for,
        nonce=runtime.nonce,
        context_tokens=configuration.inference.max_model_len,
        examples=read_examples(configuration.environment.examples),
    )
    worker = EnvironmentWorker(
        bus,
        configuration=configuration,
        name=name,
        drain=drain,
        lane=lane,
        context=context,
        on_hosting=on_hosting,
        intake=intake,
    )
    await worker.run()
