"""Held-out tasks played on demand, beside a learner or without one: asked for as ``eval`` episodes, which nobody trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from fleetbus.bus.base import Bus
from fleetbus.config.settings import Configuration
from fleetbus.episodes import decoded, episode_entry
from fleetbus.errors import UserError
from fleetbus.requests import Requests
from schemas import EpisodeFinished, EpisodeRequested, LineageStarted, PolicyPublished, Subjects, Task


async def newest_version(bus: Bus, subjects: Subjects, policy: str) -> PolicyPublished:
    """What was published last; raises `UserError` when nothing was."""
    subject = subjects.policy(policy)
    last = await bus.last(subject)
    newest = decoded(PolicyPublished, [last] if last is not None else [], beside=(LineageStarted,))
    if not newest:  # a learner is just beginning
        async for entry in bus.scan([subject]):
            newest = decoded(PolicyPublished, [entry], beside=(LineageStarted,)) or newest
    if not newest:
        raise UserError(f"policy {policy} has no version yet: start the run's learner first, or wait for its first version")
    return newest[-1][1]


async def play(
    bus: Bus,
    configuration: Configuration,
    tasks: Sequence[Task],
    *,
    name: str,
    samples: int,
    temperature: float,
    published: PolicyPublished,
    pinned: bool,
    told: Callable[[int, int], None] = lambda done, count: None,
) -> list[EpisodeFinished]:
    """One result for each of ``samples`` episodes of every task, in no order. ``name`` is in no other evaluation's episode ids.

    ``pinned``: no other version may answer; episodes that one would answer end ``lost``. Every episode ends by its deadline.
    ``told`` hears how many are done of how many.
    """
    subjects = Subjects(configuration.run.name)
    requests = Requests(bus, subjects, configuration=configuration, worker=name)
    wanted = [
        requests.make(
            task,
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
        for number, task in enumerate(tasks)
        for sample in range(samples)
    ]
    results: dict[str, EpisodeFinished] = {}
    open_ids = {request.episode_id for request in wanted}
    start = await bus.last_sequence() + 1
    async with bus.read([subjects.episodes], start=start) as reader, anyio.create_task_group() as group:
        group.start_soon(requests.close_expired)
        group.start_soon(_publish, requests, wanted)
        while open_ids:
            entry = episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished) and entry.episode_id in open_ids:
                open_ids.remove(entry.episode_id)
                requests.answered(entry.episode_id)
                results[entry.episode_id] = entry
                told(len(results), len(wanted))
        group.cancel_scope.cancel()
    return list(results.values())


async def _publish(requests: Requests, wanted: Sequence[EpisodeRequested]) -> None:
    for request in wanted:
        await requests.wait_for_room()
        await requests.publish(request)
