"""Decides if the log has room for more work: what is stored now, and what the admitted work will still store.

What others asked for counts, too, whoever it was: a learner, evaluations and rollouts fill one log together.

An episode's share of the log is measured, not set: by how much the log grew while how many episodes ended. The measure is low
where entries were removed meanwhile. Until the first episode has ended it is what the longest would take of the log's entries,
or a guess. Attempts that are made again are in the mean; more of them than the share that is kept free can fill a log, which
then stands still, says so, and continues once its limit is raised.
"""

FILL_SHARE = 0.9
"""Share of the log that admitted work may be expected to fill; the rest is for attempts that are made again, and for what must
be stored to remove anything."""

LAST_SHARE = 0.97
"""The same where nothing is open: without more work nothing would ever leave."""

MEASURED_EPISODES = 512
"""Older ones count ever less: episodes grow while a policy learns."""

UNMEASURED_BYTES = 64 << 10
"""What an episode is taken to store before one has: more than most do, so a small log is not filled by what nobody measured."""


ASSUMED_EPISODES = 16
"""For how many measured ones counts what was there before."""


class LogRoom:
    """``admission`` is the share of the log above which no work is admitted, no matter what is still on its way."""

    def __init__(self, admission: float) -> None:
        self._admission = admission
        self._used: int | None = None
        self._ended = 0
        self._measured_bytes = 0.0
        self._measured_episodes = 0.0

    @property
    def bytes_per_episode(self) -> float:
        return self._measured_bytes / self._measured_episodes if self._measured_episodes else UNMEASURED_BYTES

    def assume(self, bytes_per_episode: float, episodes: int) -> None:
        """Take the mean of a log with that many episodes until something was measured."""
        if episodes and not self._measured_episodes:
            self._measured_episodes = float(min(episodes, ASSUMED_EPISODES))
            self._measured_bytes = bytes_per_episode * self._measured_episodes

    def record_end(self) -> None:
        """An episode has its result, whoever asked for it."""
        self._ended += 1

    def is_short(self, used: int, limit: int, *, admitted: int, others: int = 0, wanted: int = 0) -> bool:
        """True if ``wanted`` more episodes have to wait, with ``used`` of ``limit`` bytes stored (0: no limit), and without a
        result ``admitted`` episodes of one's own and ``others`` of others. Without any of them nothing may leave before more is
        played: they wait only where neither the share for admission nor the estimate leaves room.
        """
        self._measure(used)
        if not limit:
            return False
        is_over = used >= limit * self._admission
        share = FILL_SHARE if admitted or others else LAST_SHARE
        may_fill = used + (admitted + others + wanted) * self.bytes_per_episode >= limit * share
        if admitted:
            return is_over or may_fill
        return may_fill and (is_over or others > 0)

    def _measure(self, used: int) -> None:
        """All growth counts, also while nothing ended: most of an episode is stored before it ends."""
        before, self._used = self._used, used
        if before is None:
            self._ended = 0
        elif used > before:
            if self._measured_episodes > MEASURED_EPISODES:
                self._measured_bytes, self._measured_episodes = self._measured_bytes / 2, self._measured_episodes / 2
            self._measured_bytes += used - before
            self._measured_episodes += self._ended
            self._ended = 0
