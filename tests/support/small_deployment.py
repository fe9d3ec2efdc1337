"""A small fleet in one process, with hands to break it: real workers on any bus, for tests on virtual time.

A `Member` is one worker as if it were a process of its own: it may be killed, cut off, drained. `SmallDeployment` watches at
all times that nobody holds more than its slots, and can say whether everything came to rest.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from fleetbus.bus.base import Bus
from fleetbus.bus.memory import Faults, MemoryServer
from fleetbus.bus.memory_bus import MemoryBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.seat_limits import parse_seat_limits
from fleetbus.config.seats import SeatSetting, build_seats, configure_seat, parse_seats
from fleetbus.config.settings import (
    Configuration,
    EnvironmentSettings,
    InferenceSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.episode.claims import EpisodeState
from fleetbus.log.episodes import decode_entries, decode_episode_entry, read_episode_state
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ControlAnswered,
    ControlRequested,
    EpisodeFinished,
    EpisodeRequested,
    Heartbeat,
    Message,
    Observation,
    PolicyPublished,
    SamplingSettings,
    Subjects,
    Task,
    WorkerRole,
    decode,
    encode,
)
from fleetbus_schemas.message import M
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.inference.base import Sampler, Template
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.learner.base import Trainer
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.up.process_plans import build_stream_plan
from tests.support.checked_bus import CheckedBus
from tests.support.deployment_member import Member
from tests.support.resources import nothing_left_behind

RUN = "small"
LANES = 4
LIMITS = LimitSettings(open=5, reset=5, step=5, action=8, verify=5, close=5, episode=60, grace=10, drain=10)

Connect = Callable[[str], AbstractAsyncContextManager[Bus]]


def build_configuration(**tables: Any) -> Configuration:
    """Short limits, few lanes; whole tables may be replaced."""
    given: dict[str, Any] = {
        "run": RunSettings(name=RUN),
        "nats": NatsSettings(lanes=LANES, max_bytes=1 << 28),
        "limits": LIMITS,
        "environment": EnvironmentSettings(slots=8),
        "inference": InferenceSettings(slots=16),
    }
    return Configuration(**(given | tables))


async def run_inline(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Blocking work without a thread: virtual time must not run on while one computes."""
    await anyio.lowlevel.checkpoint()
    return function(*args, **options)


class SmallDeployment:
    """Workers on one server, where ``bus`` is an admin's and ``operator`` an operator's. ``results`` has every stored
    EpisodeFinished by episode, ``beats`` the newest heartbeat by worker."""

    def __init__(
        self, server: MemoryServer, connect: Connect, configuration: Configuration, bus: Bus, operator: Bus, group: TaskGroup
    ) -> None:
        self.server = server
        self.connect = connect
        self.configuration = configuration
        self.bus = bus
        self.operator = operator
        self.subjects = Subjects(configuration.run.name)
        self.members: dict[str, Member] = {}
        self.results: defaultdict[str, list[EpisodeFinished]] = defaultdict(list)
        self.finished_at: dict[str, float] = {}
        self.beats: dict[str, Heartbeat] = {}
        self.most_in_flight: Counter[str] = Counter()
        self.requested: list[int] = []
        self.following = anyio.CancelScope()
        """Results are read until it is cancelled, as before the log loses some."""
        self._group = group
        self._numbers = itertools.count(1)
        self._changed = anyio.Event()
        self.runtime = Runtime(offload=run_inline, nonce=lambda: f"nonce-{next(self._numbers)}")

    # Workers

    def environment(
        self,
        name: str,
        *,
        make: Callable[[], Environment] = ScriptedEnvironment,
        slots: int | None = None,
        on_hosting: Callable[[SessionHost], None] = lambda _: None,
    ) -> Member:
        settings = msgspec.structs.replace(self.configuration.environment, **({"slots": slots} if slots else {}))
        configuration = msgspec.structs.replace(self.configuration, environment=settings)

        async def work(member: Member, bus: Bus) -> None:
            await run_environment(
                bus,
                configuration=configuration,
                name=name,
                drain=member.drain,
                make=make,
                runtime=self.runtime,
                on_hosting=on_hosting,
            )

        return self.start("environment", name, work)

    def inference(
        self, name: str, *, sampler: Sampler | None = None, template: Template | None = None, slots: int = 0, policy: str = ""
    ) -> Member:
        """A worker of the run's policy, or of another one."""
        given, replace = self.configuration, msgspec.structs.replace
        given = replace(given, inference=replace(given.inference, slots=slots or given.inference.slots))
        seats = {seat.policy: seat for seat in parse_seats(given.run.seats)}
        configuration = configure_seat(given, seats.get(policy, SeatSetting(seat=policy, policy=policy))) if policy else given

        async def work(member: Member, bus: Bus) -> None:
            await run_inference(
                bus,
                configuration=configuration,
                name=name,
                drain=member.drain,
                sampler=sampler or ScriptedSampler(),
                template=template or ScriptedTemplate(),
                runtime=self.runtime,
            )

        return self.start("inference", name, work)

    def learner(
        self,
        name: str,
        *,
        trainer: Trainer,
        curriculum: Curriculum,
        configuration: Configuration | None = None,
        judge: GroupJudge | None = None,
    ) -> Member:
        async def work(member: Member, bus: Bus) -> None:
            await run_learner(
                bus,
                configuration=configuration or self.configuration,
                name=name,
                drain=member.drain,
                trainer=trainer,
                curriculum=curriculum,
                runtime=self.runtime,
                judge=judge,
            )

        return self.start("learner", name, work)

    def start(self, role: WorkerRole, name: str, work: Callable[[Member, Bus], Awaitable[None]]) -> Member:
        member = self.members[name] = Member(role, name)
        self._group.start_soon(self._live, member, work)
        return member

    async def _live(self, member: Member, work: Callable[[Member, Bus], Awaitable[None]]) -> None:
        try:
            with member.scope:
                async with self.connect(member.name) as bus:
                    member.bus = bus
                    is_known = isinstance(bus, MemoryBus) or member.name.startswith(member.role)
                    assert is_known, f"{member.name}: on a server its name begins with its role, whose key it has"
                    await work(member, cast(Bus, CheckedBus(bus, member.role)))
        except Exception as error:  # the end of a process: what a shell would see as a traceback and exit code 1
            member.error = error
        finally:
            member.ended.set()
            self._wake()

    async def heard(self, *members: Member) -> None:
        await self.until(lambda: all(member.name in self.beats or member.ended.is_set() for member in members))

    async def control(self, member: Member, command: str, *episodes: str) -> ControlAnswered:
        payload = encode(ControlRequested(command=command, episodes=episodes))  # type: ignore[arg-type]
        subject = self.subjects.control(member.role, member.name, command)
        return decode(ControlAnswered, await self.operator.request(subject, payload, timeout=30))

    # Episodes

    async def publish_policy(self, version: int = 0, *, uri: str = "") -> None:
        subject = self.subjects.policy("default")
        published = PolicyPublished(
            policy="default", version=version, lineage="l1", step=version, uri=uri, manifest=(), size_bytes=0
        )
        await self.bus.publish(subject, encode(published))

    async def request(
        self,
        episode_id: str = "e",
        *,
        task: Task | None = None,
        deadline_seconds: float = 300.0,
        max_turns: int = 50,
        sampling: SamplingSettings | None = None,
        timeout_reward: float | None = None,
    ) -> int:
        request = EpisodeRequested(
            episode_id=episode_id,
            group_id="g",
            sample_index=0,
            split="train",
            task=task or Task(key="task", prompt="play"),
            policy="default",
            sampling=sampling or SamplingSettings(),
            max_turns=max_turns,
            deadline_ns=self.bus.now_ns() + int(deadline_seconds * 1e9),
            timeout_reward=timeout_reward,
            seats=build_seats(self.configuration),
            seat_limits=parse_seat_limits(self.configuration.episode.seat_limits),
        )
        stored = await self.bus.publish(self.subjects.task("default", episode_id), encode(request), expected_last=0)
        self.requested.append(stored.sequence)
        return stored.sequence

    async def result(self, episode_id: str = "e") -> EpisodeFinished:
        await self.until(lambda: bool(self.results[episode_id]))
        return self.results[episode_id][0]

    async def all_results(self, count: int) -> list[EpisodeFinished]:
        await self.until(lambda: sum(map(len, self.results.values())) >= count)
        return [result for results in self.results.values() for result in results]

    async def episode_state(self, episode_id: str = "e") -> EpisodeState:
        return await read_episode_state(self.bus, self.subjects, episode_id)

    async def claims(self, episode_id: str = "e") -> tuple[AttemptStarted, ...]:
        return (await self.episode_state(episode_id)).claims

    async def actions(self) -> list[Action]:
        return await self._all(Action, self.subjects.actions())

    async def observations(self) -> list[Observation]:
        return await self._all(Observation, self.subjects.observations())

    async def _all(self, expected: type[M], subject: str) -> list[M]:
        return [message for _, message in decode_entries(expected, [entry async for entry in self.bus.scan([subject])])]

    async def stored(self, subject: str, message: Message) -> int:
        """Write a message as somebody else would."""
        return (await self.bus.publish(subject, encode(message))).sequence

    # Watching

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until a condition on results, heartbeats or ended members holds."""
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def follow_results(self) -> None:
        with self.following:
            await self._follow_results()

    async def _follow_results(self) -> None:
        async with self.bus.read([self.subjects.episodes]) as reader:
            while True:
                entry = decode_episode_entry(await reader.receive())
                if isinstance(entry, EpisodeFinished):
                    self.results[entry.episode_id].append(entry)
                    self.finished_at.setdefault(entry.episode_id, anyio.current_time())
                    self._wake()

    async def follow_heartbeats(self) -> None:
        async with self.bus.listen(self.subjects.heartbeats) as listener:
            while True:
                beat = decode(Heartbeat, (await listener.receive())[1])
                self.beats[beat.worker] = beat
                self.most_in_flight[beat.worker] = max(self.most_in_flight[beat.worker], beat.in_flight)
                assert beat.role == "learner" or 0 <= beat.in_flight <= beat.slots, beat
                self._wake()

    async def check_at_rest(self) -> None:
        """Everything that was begun has come to its end: slots, sessions, leases and requests; nothing comes back later."""
        alive = [each for each in self.members.values() if not each.ended.is_set() and each.role != "learner"]
        for member in alive:
            self.beats.pop(member.name, None)
        await self.until(lambda: all(each.name in self.beats for each in alive))
        for member in alive:
            assert self.beats[member.name].in_flight == 0, f"{member.name} has slots in use"
            assert (await self.control(member, "ping")).busy_with == (), f"{member.name} has sessions"
        end = (await self.bus.log_state()).last_sequence
        floors = {floor.filter: floor.ack_floor for floor in await self.bus.ack_floors()}
        assert floors[self.subjects.tasks("default")] >= max(self.requested), "a request is not acked"
        await anyio.sleep(12)
        assert (await self.bus.log_state()).last_sequence == end, "something went on after the end"
        assert all(len(results) == 1 for results in self.results.values()), "an episode has more than one result"

    async def drain_members(self, members: Sequence[Member] | None = None) -> None:
        """Drain these members, or all that live, and wait for their end."""
        members = list(self.members.values()) if members is None else members
        for member in members:
            member.drain.set()
        for member in members:
            await member.ended.wait()


@asynccontextmanager
async def small_deployment(
    configuration: Configuration | None = None,
    *,
    connect: Connect | None = None,
    faults: Faults | None = None,
    published: bool = True,
    declared: bool = False,
) -> AsyncIterator[SmallDeployment]:
    """A run that is declared, here unless it is already, and, if ``published``, has its first policy version. At the end all
    members are drained, and none may have failed."""
    server = MemoryServer(faults=faults)
    configuration = configuration or build_configuration()
    connect = connect or (lambda name: server.connect(configuration.run.name, worker=name))
    with nothing_left_behind():
        async with connect("test") as bus, connect("operator") as operator:
            if not declared:
                await bus.declare(build_stream_plan(configuration))
            async with anyio.create_task_group() as group:
                fleet = SmallDeployment(server, connect, configuration, bus, operator, group)
                group.start_soon(fleet.follow_results)
                group.start_soon(fleet.follow_heartbeats)
                if published:
                    await fleet.publish_policy()
                yield fleet
                await fleet.drain_members()
                group.cancel_scope.cancel()
        failed = {each.name: each.error for each in fleet.members.values() if each.error and not each.is_expected_to_fail}
        assert not failed, failed
