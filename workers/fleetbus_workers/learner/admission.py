"""Requests groups as fast as staleness, engines and the log allow; open requests of earlier lineages are taken over first."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import anyio
import structlog

from fleetbus.bus.base import Bus
from fleetbus.config.settings import LearnerSettings, RunSettings
from fleetbus.core.training.capacity import count_admissible_groups
from fleetbus.core.training.engine_pressure import EnginePressure
from fleetbus.core.training.floor import parse_group_number
from fleetbus.delivery.heartbeats import follow_heartbeats
from fleetbus.delivery.requests import Requests
from fleetbus_schemas import EpisodeRequested, Heartbeat, Subjects
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.joint_progress import JointProgress
from fleetbus_workers.learner.league import LearnerLeague
from fleetbus_workers.learner.pool import GroupPool

log = structlog.get_logger()


class Admission:
    """The training requests of one lineage. ``progress`` returns the steps done and the newest version.

    ``floor`` and ``next_group`` are those of the checkpoint: below the floor every request of an earlier group is settled.
    ``joint``: the learners that train from the same episodes. ``league``: the opponents of groups.
    """

    def __init__(
        self,
        requests: Requests,
        pool: GroupPool,
        curriculum: Curriculum,
        *,
        settings: LearnerSettings,
        lineage: str,
        floor: int = 1,
        next_group: int,
        progress: Callable[[], tuple[int, int]],
        joint: JointProgress | None = None,
        league: LearnerLeague | None = None,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._curriculum = curriculum
        self._settings = settings
        self._lineage = lineage
        self._progress = progress
        self._joint = joint or JointProgress()
        self._league = league or LearnerLeague(RunSettings())
        self._floor = floor
        self._first_new_group = next_group
        self.next_group = next_group
        self._resumed = anyio.Event()
        self._resumed.set()
        self._pressure = EnginePressure(
            least=settings.group_size, most=settings.groups * settings.group_size * (1 + settings.max_staleness)
        )

    @property
    def episode_limit(self) -> int:
        """Episodes that may be out at a time, by what the engines say of themselves."""
        return self._pressure.limit

    @property
    def metrics(self) -> dict[str, float]:
        """``episode_limit``, for a step's entry."""
        return {"episode_limit": float(self.episode_limit)}

    async def follow(self, bus: Bus, subjects: Subjects) -> None:
        """Let out more or fewer episodes as the engines' caches have room and other learners keep up, until cancelled."""

        def record(beat: Heartbeat) -> None:
            now = anyio.current_time()
            self._pressure.record(beat.worker, beat.engine, now)
            if self._pressure.adjust(self._pool.open_episodes, now):
                log.info("admission follows the engines", episodes=self.episode_limit, reason=self._pressure.reason)
                self._pool.notify()

        async with anyio.create_task_group() as group:
            group.start_soon(self._joint.follow, bus, subjects, self._pool.notify)
            await follow_heartbeats(bus, subjects.heartbeat("inference", "*"), record)

    def pause(self, is_paused: bool) -> None:
        """Request no new groups from now on, or go on: what was requested before is played and trained."""
        if is_paused == self.is_paused:
            return
        log.info("admission paused by request" if is_paused else "admission resumed by request")
        if is_paused:
            self._resumed = anyio.Event()
        else:
            self._resumed.set()

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    @property
    def first_open_group(self) -> int:
        """The first group that may still be asked for, in whole or in part."""
        return min((parse_group_number(group_id) for group_id in self._pool.group_ids), default=self.next_group)

    async def take_over(self, requests: Iterable[tuple[int, EpisodeRequested]], first_group: int = 0) -> None:
        """Requests that are not settled are this lineage's now; groups that were left incomplete are filled up.

        Of settled ones the ledger has to know the position, or the next checkpoint would not name them. Groups below
        ``first_group`` are settled for good.
        """
        self.next_group = max(self.next_group, first_group)
        members: defaultdict[str, set[int]] = defaultdict(set)
        settled: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for sequence, request in requests:
            self.next_group = max(self.next_group, parse_group_number(request.group_id) + 1)
            self._league.adopt(request)
            if not self._pool.register_request(request.episode_id, sequence):
                settled[request.group_id][request.sample_index] = request.episode_id
                continue
            self._pool.admit(request.group_id, request.group_size, version=request.policy_version)
            self._pool.expect(request.episode_id, request.group_id, request.deadline_ns)
            self._requests.track(request, sequence)
            members[request.group_id].add(request.sample_index)
        for group_id, indices in members.items():
            missing = set(range(self._pool.size(group_id))) - indices - settled[group_id].keys()
            for episode_id in settled[group_id].values():
                self._pool.record_settlement(episode_id, group_id)
            await self._request_group(group_id, sorted(missing))
        self._joint.begin(self.next_group)

    async def run(self, drain: anyio.Event) -> None:
        """Keep as many groups out as staleness allows, until drained."""
        while not drain.is_set():
            changed = self._pool.changed
            admissible = self._count_admissible()
            if not admissible:
                await changed.wait()
                continue
            for _ in range(admissible):
                await self._resumed.wait()
                await self._wait_while_failing()
                await self._requests.wait_for_room(self._settings.group_size)
                if self.is_paused or not self._count_engine_room():  # engines may have filled up meanwhile
                    break
                group_id = f"g{self.next_group:06d}"
                self.next_group += 1
                await self._request_group(group_id, range(self._settings.group_size))

    async def _wait_while_failing(self) -> None:
        """After rounds of groups without any use, one group at a time, until one can be used again."""
        round_size = (1 + self._settings.max_staleness) * self._settings.groups
        pause_seconds = self._pool.pause_seconds(round_size)
        if pause_seconds:
            log.warning("recent groups cannot be trained; pausing admission", seconds=pause_seconds)
        with anyio.move_on_after(pause_seconds):
            while self._pool.pause_seconds(round_size):
                await self._pool.changed.wait()

    def _count_admissible(self) -> int:
        """Groups that may be requested now; 0 until the newest step's version is published, or they would soon be stale."""
        step, _ = self._progress()
        if self._pool.published_step < step:
            return 0
        allowed = count_admissible_groups(
            step=step,
            last_step=self._settings.steps,
            batch=self._settings.groups,
            max_staleness=self._settings.max_staleness,
            outstanding=max(len(self._pool), self._joint.count_outstanding(self.next_group)),
        )
        return min(allowed, self._count_engine_room())

    def _count_engine_room(self) -> int:
        """The groups for which the engines have room, by what they say of themselves."""
        return max(self.episode_limit - self._pool.open_episodes, 0) // self._settings.group_size

    async def _request_group(self, group_id: str, indices: Sequence[int]) -> None:
        """Publish the requests of a group together; all its episodes play the same task, against the same opponents."""
        size = self._pool.admit(group_id, self._settings.group_size).size
        task = self._curriculum.task(parse_group_number(group_id))
        _, version = self._progress()
        opponents = self._league.draw(group_id, version)

        async def publish(index: int) -> None:
            request = self._requests.build_request(
                task,
                episode_id=f"{group_id}-{index}",
                group_id=group_id,
                sample_index=index,
                group_size=size,
                split="train",
                lineage=self._lineage,
                version=version,
                opponents=opponents,
            )
            self._pool.expect(request.episode_id, group_id, request.deadline_ns)
            stored = await self._requests.publish(request)
            sequence, result = stored.sequence, stored.result
            self._pool.record_deadline(request.episode_id, stored.request.deadline_ns)
            if sequence < self._floor and parse_group_number(group_id) < self._first_new_group:
                self._requests.mark_answered(request.episode_id)
                self._pool.record_settlement(request.episode_id, group_id)
                return
            self._pool.register_request(request.episode_id, sequence)
            if result is not None:
                self._pool.add_result(result, sequence)

        async with anyio.create_task_group() as group:
            for index in indices:
                group.start_soon(publish, index)
