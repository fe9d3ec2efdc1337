"""The results that a learner reads: each goes to the evaluation or to the group that asked for it."""

from collections.abc import MutableMapping

from fleetbus.bus.base import Bus
from fleetbus.core.episode.claim_seals import ClaimSeals, without_verdict
from fleetbus.delivery.requests import Requests
from fleetbus.log.episodes import decode_episode_entry, scan_training_results
from fleetbus_schemas import EpisodeFinished, Subjects
from fleetbus_workers.learner.evaluation import Evaluations
from fleetbus_workers.learner.joined_requests import JoinedRequests
from fleetbus_workers.learner.pool import GroupPool


class Results:
    """``counters["results"]`` counts what was read of the log. ``joined``: of a learner that trains what another asks for."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        requests: Requests,
        pool: GroupPool,
        evaluations: Evaluations,
        counters: MutableMapping[str, float],
        joined: JoinedRequests | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._results = subjects.episodes.removesuffix(">")
        self._requests = requests
        self._pool = pool
        self._evaluations = evaluations
        self._counters = counters
        self._joined = joined

    async def follow(self, floor: int) -> None:
        """Read results from ``floor`` on, for ever; claims and goodbyes stand on the same subjects. A learner that does not ask
        reads the requests between them."""
        seals, joined = ClaimSeals(), self._joined
        others = joined.list_subjects(self._subjects) if joined is not None else []
        async with self._bus.read([self._subjects.episodes, *others], start=floor) as reader:
            while True:
                stored = await reader.receive()
                if joined is not None and not stored.subject.startswith(self._results):
                    joined.enter(stored)
                    continue
                entry = decode_episode_entry(stored)
                is_of_claim = seals.enter(entry)
                if isinstance(entry, EpisodeFinished):
                    self._requests.record_result(stored.sequence, entry.episode_id)
                    self._counters["results"] += 1
                    self.enter(entry, stored.sequence, is_of_claim=is_of_claim)

    def enter(self, result: EpisodeFinished, sequence: int | None = None, *, is_of_claim: bool = True) -> None:
        """``sequence``: where it was read; None if it is this learner's own. ``is_of_claim``: the process that held the episode
        stored it. It goes to who asked for the episode, whatever split it names: else that one waits for it without end."""
        if self._evaluations.expects(result.episode_id):
            self._evaluations.add_result(result if is_of_claim else without_verdict(result))
            return
        self._pool.add_result(result, result.request_sequence if sequence is None else sequence, is_of_claim=is_of_claim)

    async def enter_stored(self, floor: int) -> None:
        """Enter all results of training that stand in the log by now: who begins at the last step may not have read any yet."""
        if self._joined is not None:
            async for entry in self._bus.scan([self._subjects.tasks()], start=floor):
                self._joined.enter(entry)
        async for sequence, result, is_of_claim in scan_training_results(self._bus, self._subjects, start=floor):
            self._pool.add_result(result, sequence, is_of_claim=is_of_claim)
