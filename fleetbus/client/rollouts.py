"""Finished, graded, grouped episodes for an external trainer: its loop, its optimizer; the workers play.

    async with rollouts(bus, configuration, tasks, group_size=8) as groups:
        async for group in groups:
            for episode in group.graded:
                for sequence in episode.sequences:
                    train(sequence.ids, sequence.loss_mask, sequence.logprobs, episode.reward)

Environment and inference workers do the rest: the trainer publishes its weights as `PolicyPublished`, or lets the inference
workers sample from a server of its own. Episodes are asked for as evaluation: a learner of the run does not count them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectSendStream

from fleetbus.bus.base import LogBus
from fleetbus.concurrency.runtime import Runtime
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.config.pools import find_pool, parse_pools
from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.reward_components import find_reward_problem, list_all_rewards
from fleetbus.core.episode.claim_seals import ClaimSeals, without_verdict
from fleetbus.core.episode.history import Turn, collect_token_ids, loss_mask
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.core.episode.segments import SegmentError, find_leaves, fold_segments, split_first
from fleetbus.delivery.requests import UNANSWERED, Requests
from fleetbus.errors import RequestUnanswered
from fleetbus.log.actions import MissingActions, read_actions
from fleetbus.log.episodes import RETRY_SECONDS, decode_episode_entry
from fleetbus.logs.trace_context import name_episode
from fleetbus_schemas import GRADED, AttemptStarted, EpisodeFinished, EpisodeSeat, Outcome, Subjects, Task
from fleetbus_schemas.tokens import unpack_logprobs

MAX_UNCLAIMED = 8
"""Episodes of a pool that are asked for and that no worker has taken up, or one group: meanwhile their time runs out."""

log = structlog.get_logger()


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence that the policy sampled from, a leaf of the episode's segments (docs/concepts/episode.md).

    ``ids``: all token ids in order, as they were sampled and never re-tokenised; ``loss_mask``: True for those that are trained
    here, which are the policy's own, each in one sequence of the episode only; ``logprobs``: one per id under the sampling
    temperature, 0.0 where the mask is False. All three have the same length. ``seat`` is whose it is, if there are
    several: its reward is that of the same name in `Episode.seats`.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    segment: int = 0
    seat: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Number of ids before the first that is trained."""
        return self.loss_mask.index(True) if True in self.loss_mask else len(self.loss_mask)


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One finished episode. ``reward`` is None unless ``outcome`` is graded: never train on such an episode.

    ``sequences``: what was sampled, one sequence unless the policy's context changed on the way; `ids`, `loss_mask`, `logprobs`
    and `prompt_tokens` are those of the only one. ``texts``: what the policy said, by turn. ``reward`` is the total of the
    episode, however many sequences it has, ``turn_rewards`` included. ``success``, ``info``, ``last_observation`` and ``seats``
    are as in `EpisodeFinished`.
    """

    episode_id: str
    task: Task
    outcome: Outcome
    reward: float | None
    turn_rewards: tuple[float, ...]
    sequences: tuple[SampledSequence, ...]
    texts: tuple[str, ...]
    policy_versions: tuple[int, ...]
    error: str = ""
    success: bool | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    last_observation: str = ""
    seats: tuple[EpisodeSeat, ...] = ()

    @property
    def only_sequence(self) -> SampledSequence:
        """The episode's only sequence, empty if nothing was sampled. Raises `ValueError` if it has several."""
        if len(self.sequences) > 1:
            raise ValueError(
                f"episode {self.episode_id} has {len(self.sequences)} token sequences, because its context changed on the way: "
                "train each of episode.sequences"
            )
        return self.sequences[0] if self.sequences else SampledSequence(ids=(), loss_mask=(), logprobs=())

    @property
    def ids(self) -> tuple[int, ...]:
        """Those of the only sequence."""
        return self.only_sequence.ids

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """That of the only sequence."""
        return self.only_sequence.loss_mask

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Those of the only sequence."""
        return self.only_sequence.logprobs

    @property
    def prompt_tokens(self) -> int:
        """Number of ids of the only sequence before the policy's first."""
        return self.only_sequence.prompt_tokens


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All episodes of one task, by sample index; ``graded`` are those that may be trained."""

    task: Task
    episodes: tuple[Episode, ...]

    @property
    def graded(self) -> tuple[Episode, ...]:
        return tuple(episode for episode in self.episodes if episode.reward is not None and episode.sequences)


@asynccontextmanager
async def rollouts(
    bus: LogBus,
    configuration: Configuration,
    tasks: Iterable[Task],
    *,
    group_size: int = 8,
    groups_at_a_time: int = 16,
    version: int = 0,
    pinned: bool = False,
    temperature: float | None = None,
    worker: str = "rollouts",
    runtime: Runtime | None = None,
) -> AsyncIterator[AsyncIterator[RolloutGroup]]:
    """Groups in the order in which they finish; every task is played ``group_size`` times.

    At most ``groups_at_a_time`` are out or wait to be taken: a caller that trains slowly slows the workers down. No more are
    asked for of a pool in which `MAX_UNCLAIMED` episodes wait for a worker. Episodes end by the configuration's
    ``limits.episode`` at the latest. A context, because tasks run behind it: leaving it ends them.
    ``pinned``: no version but ``version``, which is published before, answers; episodes that another would answer are ``lost``.

    Beside a recorder the log keeps result and Actions of a finished episode for two minutes. What is read later, because the
    caller held up its event loop, comes from ``learner.archive``; without it such an episode is ``lost``, with the reason.
    """
    subjects = Subjects(configuration.run.name)
    requests = Requests(bus, subjects, configuration=configuration, worker=worker, runtime=runtime)
    archive = Path(configuration.learner.archive) if configuration.learner.archive else None
    sampled = _Sampled(version=version, pinned=pinned, temperature=temperature)
    most = configuration.environment.max_abs_reward
    pools = parse_pools(configuration.run.pool)
    group_runner = _GroupRunner(bus, subjects, requests, pools, group_size, sampled, most, archive, runtime or Runtime())
    places = anyio.Semaphore(groups_at_a_time)
    start = await _find_next_sequence(bus)
    finished, groups = anyio.create_memory_object_stream[RolloutGroup](groups_at_a_time)
    async with open_first_error_task_group() as working:
        working.start_soon(requests.close_expired, group_runner.enter)
        working.start_soon(group_runner.follow_results, start)

        async def ask() -> None:
            async with finished, anyio.create_task_group() as playing:
                for task in tasks:
                    await places.acquire()
                    playing.start_soon(group_runner.play_group, task, finished.clone())

        async def iterate_groups() -> AsyncGenerator[RolloutGroup, None]:
            async for group in groups:
                places.release()
                yield group

        working.start_soon(ask)
        async with groups, aclosing(iterate_groups()) as iterator:
            yield iterator
        working.cancel_scope.cancel()


async def _find_next_sequence(bus: LogBus) -> int:
    """The first log position at which results of what is asked for now can stand, however long the server is away."""
    while True:
        try:
            return (await bus.log_state()).last_sequence + 1
        except RequestUnanswered as unanswered:
            log.warning("log read failed; retrying", reason=str(unanswered))
            await anyio.sleep(RETRY_SECONDS)


class _Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """From which version episodes are sampled, and at which temperature: None for the configuration's."""

    version: int
    pinned: bool
    temperature: float | None


class _Pool:
    """Episodes of one pool that wait for a worker: groups of other pools do not wait for them."""

    def __init__(self) -> None:
        self.turn = anyio.Lock()
        self._unclaimed = 0
        self._wakeup = anyio.Event()
        self.is_idle = False
        """True if the last deadline passed before a worker took its episode up: then the others' may pass side by side."""

    async def wait_for_claims(self, episodes: int) -> None:
        """Return once few enough wait for a worker that so many more, which are counted, may be asked for. In one's turn."""
        while not self.is_idle and self._unclaimed and self._unclaimed + episodes > MAX_UNCLAIMED:
            self._wakeup = anyio.Event()
            await self._wakeup.wait()
        self._unclaimed += episodes

    def record_claim(self) -> None:
        self._unclaimed -= 1
        self._wakeup.set()


class _GroupRunner:
    """Groups that are out, and who waits for which result."""

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        requests: Requests,
        pools: Mapping[str, str],
        group_size: int,
        sampled: _Sampled,
        max_abs_reward: float,
        archive: Path | None,
        runtime: Runtime,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._requests = requests
        self._pool_names = pools
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)
        self._admission = anyio.Lock()  # of one group at a time, whatever its pool: side by side all would find the same room
        self._group_size = group_size
        self._sampled = sampled
        self._max_abs_reward = max_abs_reward
        self._archive = archive
        self._runtime = runtime
        self._waiting: dict[str, tuple[anyio.Event, list[EpisodeFinished]]] = {}
        self._unclaimed: dict[str, _Pool] = {}
        """By episode of a group that has begun, and that no worker has taken up, the pool that it waits in."""

    def _record_claim(self, episode_id: str, *, is_idle: bool) -> None:
        if (pool := self._unclaimed.pop(episode_id, None)) is not None:
            pool.is_idle = is_idle
            pool.record_claim()

    async def follow_results(self, start: int) -> None:
        """Pass results on to the waiting groups until cancelled."""
        seals = ClaimSeals()
        async with self._bus.read([self._subjects.episodes], start=start) as reader:
            while True:
                stored = await reader.receive()
                entry = decode_episode_entry(stored)
                is_of_claim = seals.enter(entry)
                if isinstance(entry, AttemptStarted):
                    self._record_claim(entry.episode_id, is_idle=False)
                if isinstance(entry, EpisodeFinished) and not self._requests.is_own_close(entry):
                    self._requests.record_result(stored.sequence, entry.episode_id)
                    self.enter(entry if is_of_claim else without_verdict(entry))

    def enter(self, result: EpisodeFinished) -> None:
        """Pass a result on to its waiter, if there is one."""
        self._record_claim(result.episode_id, is_idle=result.error_class == UNANSWERED)
        if result.episode_id in self._waiting:
            event, results = self._waiting[result.episode_id]
            results.append(result)
            event.set()

    async def play_group(self, task: Task, finished: MemoryObjectSendStream[RolloutGroup]) -> None:
        """One group from its requests to its last episode."""
        group_id = f"r{self._runtime.nonce()}"
        pool = self._pools[find_pool(self._pool_names, task.env)]
        episodes: dict[int, Episode] = {}

        async def play_episode(index: int) -> None:
            episodes[index] = await self._play_episode(task, group_id, index)

        async with finished:
            async with pool.turn:
                await pool.wait_for_claims(self._group_size)
                async with self._admission:
                    await self._requests.wait_for_room(self._group_size)
            self._unclaimed |= dict.fromkeys((f"{group_id}-k{index}" for index in range(self._group_size)), pool)
            async with anyio.create_task_group() as group:
                for index in range(self._group_size):
                    group.start_soon(play_episode, index)
            await finished.send(RolloutGroup(task=task, episodes=tuple(episodes[index] for index in sorted(episodes))))

    async def _play_episode(self, task: Task, group_id: str, index: int) -> Episode:
        request = self._requests.build_request(
            task,
            episode_id=f"{group_id}-k{index}",
            group_id=group_id,
            sample_index=index,
            group_size=self._group_size,
            split="eval",
            lineage="",
            version=self._sampled.version,
            pinned=self._sampled.pinned,
            temperature=self._sampled.temperature,
        )
        event, results = self._waiting[request.episode_id] = anyio.Event(), []
        with structlog.contextvars.bound_contextvars(run=self._subjects.run, **name_episode(request)):
            try:
                stored = await self._requests.publish(request)
                structlog.contextvars.bind_contextvars(**name_episode(stored.request))
                if (result := stored.result) is None:
                    await event.wait()
                    result = results[0]
                return await self._read_episode(task, result)
            finally:
                self._record_claim(request.episode_id, is_idle=False)
                del self._waiting[request.episode_id]

    async def _read_episode(self, task: Task, result: EpisodeFinished) -> Episode:
        """The episode's tokens, from the Actions that its result names; without them it is lost, with every outcome. A reward
        out of bounds, which would spoil a whole batch, is no verdict, whoever stored it."""
        if problem := find_reward_problem(list_all_rewards(result), self._max_abs_reward):
            log.error("a reward is out of bounds; taking the episode without its verdict", reason=problem)
            error = f"its verdict does not count: {problem}"
            result = msgspec.structs.replace(without_verdict(result), error_class=problem, error=error)
        try:
            found = await read_actions(self._bus, self._subjects, [result], archive=self._archive, runtime=self._runtime)
        except MissingActions as missing:
            log.error("episode read failed; counting it as lost", reason=str(missing))
            return _build_episode(task, result, (), outcome="lost", error=str(missing))
        if problem := find_actions_problem(result, found[result.episode_id]):
            log.error("actions do not fit the result; counting the episode as lost", reason=problem)
            return _build_episode(task, result, (), outcome="lost", error=f"its actions do not fit its result: {problem}")
        turns = [
            Turn(sequence=reference.sequence, lane=reference.lane, action=action)
            for reference, action in zip(result.actions, found[result.episode_id], strict=True)
        ]
        try:
            return _build_episode(task, result, turns, outcome=result.outcome, error=result.error)
        except SegmentError as broken:
            log.error("segments are broken; counting the episode as lost", reason=str(broken))
            return _build_episode(task, result, (), outcome="lost", error=f"its segments are broken: {broken}")


def _build_episode(task: Task, result: EpisodeFinished, turns: Sequence[Turn], *, outcome: Outcome, error: str) -> Episode:
    return Episode(
        episode_id=result.episode_id,
        task=task,
        outcome=outcome,
        reward=result.reward if outcome in GRADED else None,
        turn_rewards=result.turn_rewards,
        sequences=tuple(_collect_sequences(turns, result)),
        texts=tuple(turn.action.text for turn in turns),
        policy_versions=result.policy_versions,
        error=error,
        success=result.success,
        info=result.info,
        last_observation=result.last_observation,
        seats=result.seats,
    )


def _collect_sequences(turns: Sequence[Turn], result: EpisodeFinished) -> Iterator[SampledSequence]:
    """The leaves of these turns, without those of a grade's seats that have no reward, which another model may have sampled;
    each sampled token is trained in the first that holds it. Raises `SegmentError`."""
    unrewarded = result.unrewarded_turns if result.outcome in GRADED else frozenset()
    untrained = {each.turn for each in result.untrained}
    seats = {turn: seat.name for seat in result.seats for turn in seat.turns}
    ids, mask = collect_token_ids(turns), loss_mask(turns, untrained)
    trained_turns = [turn for number, turn in enumerate(turns) if number not in untrained]
    sampled = iter([value for turn in trained_turns for value in unpack_logprobs(turn.action.logprobs)])
    logprobs = [next(sampled) if own else 0.0 for own in mask]
    leaves = find_leaves(fold_segments(turns))
    for leaf, parts in zip(leaves, split_first(leaves), strict=True):
        if leaf.turns and unrewarded.issuperset(leaf.turns):
            continue
        places = [(place, first) for (start, stop), first in parts for place in range(start, stop)]
        trained = tuple(mask[place] and first for place, first in places)
        yield SampledSequence(
            segment=leaf.number,
            ids=tuple(ids[place] for place, _ in places),
            loss_mask=trained,
            logprobs=tuple(logprobs[place] if own else 0.0 for (place, _), own in zip(places, trained, strict=True)),
            seat=seats.get(leaf.turns[-1], ""),
        )
