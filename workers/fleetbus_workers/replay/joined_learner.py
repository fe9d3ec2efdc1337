"""Replay of a learner that asks for no episodes: it trains the seats of its policy in those that another learner asked for."""

from __future__ import annotations

from fleetbus_schemas import EpisodeRequested, TrainingFinished
from fleetbus_workers.replay.learner_driver import LearnerDriver
from fleetbus_workers.replay.recorded_episode import RecordedEpisode


class JoinedLearnerDriver(LearnerDriver):
    """Stores the request of each episode that the lineage settled right before its result: no other has a part in a batch."""

    kinds = ("train", "policy")

    def _schedule(self, open_episodes: list[RecordedEpisode]) -> None:
        for message in self.lineage.messages:
            if isinstance(message, TrainingFinished):
                self._consumed_in.update((each.episode_id, self._last_step + 1) for each in message.excluded)
        self._unasked = self._consumed_in.keys() - {episode.episode_id for episode in open_episodes}
        for episode_id, step in self._consumed_in.items():
            if (episode := self._episodes.get(episode_id)) is not None and isinstance(episode.request, EpisodeRequested):
                self._ready[step].append(episode)

    async def _store_result(self, episode: RecordedEpisode) -> None:
        if episode.episode_id in self._unasked and episode.request_entry is not None:
            self._unasked.discard(episode.episode_id)
            self.environment.store_as_recorded(episode.request_entry)
        await super()._store_result(episode)
