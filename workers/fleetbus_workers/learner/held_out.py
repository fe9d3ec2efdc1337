"""Held-out tasks played on demand, beside a learner or without one: asked for as ``eval`` episodes, which are never trained
on."""

from collections import deque
from collections.abc import Callable, Sequence

import anyio

from fleetbus.bus.base import LogBus
from fleetbus.config.settings import Configuration
from fleetbus.core.episode.claim_seals import ClaimSeals, without_verdict
from fleetbus.core.episode.claims import EpisodeEntry
from fleetbus.delivery.requests import UNANSWERED, Requests
from fleetbus.errors import UserError
from fleetbus.log import newest_version
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, PolicyPublished, Subjects, Task

MAX_UNCLAIMED = 8
"""Episodes that are asked for and that no worker has taken up: while they wait, their deadlines come nearer."""


async def find_newest_version(bus: LogBus, subjects: Subjects, policy: str) -> PolicyPublished:
    """Find the version that was published last; raises `UserError` when nothing was."""
    newest = await newest_version.find_newest_version(bus, subjects.policy(policy))
    if newest is None:
        raise UserError(f"policy {policy} has no version yet: start the run's learner first, or wait for its first version")
    return newest[1]


async def play(
    bus: LogBus,
    configuration: Configuration,
    tasks: Sequence[Task],
    *,
    name: str,
    samples: int,
    temperature: float,
    published: PolicyPublished,
    pinned: bool,
    on_progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[EpisodeFinished]:
    """One result for each of ``samples`` episodes of every task, in no order. ``name`` is in no other evaluation's episode ids.

    ``pinned``: no other version may answer; episodes that one would answer end ``lost``. Every episode ends by its deadline.
    ``on_progress`` is called with the numbers done and in all. Once a deadline passes before a worker took the episode up, no
    more are asked
    for, and their results are missing.
    """
    subjects = Subjects(configuration.run.name)
    requests = Requests(bus, subjects, configuration=configuration, worker=name)
    remaining = deque((number, sample) for number in range(len(tasks)) for sample in range(samples))
    places = anyio.Semaphore(MAX_UNCLAIMED)
    unclaimed: set[str] = set()
    open_ids: set[str] = set()
    results: list[EpisodeFinished] = []

    async def request_episodes() -> None:
        while remaining:
            await places.acquire()
            await requests.wait_for_room()
            if not remaining:
                return
            number, sample = remaining.popleft()
            request = requests.build_request(
                tasks[number],
                episode_id=f"{name}-{number:04d}-{sample:03d}",
                group_id=f"{name}-{number:04d}",
                sample_index=sample,
                group_size=samples,
                split="eval",
                lineage=published.lineage,
                version=published.version,
                pinned=pinned,
                temperature=temperature,
            )
            open_ids.add(request.episode_id)
            unclaimed.add(request.episode_id)
            await requests.publish(request)

    start = (await bus.log_state()).last_sequence + 1
    async with bus.read([subjects.episodes], start=start) as reader, anyio.create_task_group() as group:

        def enter(entry: EpisodeEntry) -> None:
            if entry.episode_id not in open_ids:
                return
            if entry.episode_id in unclaimed:
                unclaimed.remove(entry.episode_id)
                places.release()
            if isinstance(entry, EpisodeFinished):
                open_ids.remove(entry.episode_id)
                results.append(entry)
                on_progress(len(results), len(tasks) * samples)
                if entry.error_class == UNANSWERED and not entry.attempt:
                    remaining.clear()
            if not remaining and not open_ids:
                group.cancel_scope.cancel()

        group.start_soon(requests.close_expired, enter)
        group.start_soon(request_episodes)
        seals = ClaimSeals()
        while remaining or open_ids:
            stored = await reader.receive()
            entry = decode_episode_entry(stored)
            is_of_claim = seals.enter(entry)
            if isinstance(entry, EpisodeFinished):
                if requests.is_own_close(entry):
                    continue
                requests.record_result(stored.sequence, entry.episode_id)
            if entry is not None:
                enter(entry if is_of_claim or not isinstance(entry, EpisodeFinished) else without_verdict(entry))
        group.cancel_scope.cancel()
    return results
