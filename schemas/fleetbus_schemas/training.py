"""The learner's journal: what was trained, and where it can resume. All on ``train.<name>``, each expecting the last."""

from __future__ import annotations

import math

import msgspec

from fleetbus_schemas.message import Message


class LineageStarted(Message, frozen=True, kw_only=True):
    """A learner begins or takes over: everything that ``parent`` trained after ``parent_step`` is void.

    Stored on ``train.<name>`` and, to fence the learner before, on ``policy.<name>`` too. ``nonce`` identifies one's own entry.

    ``floor`` is the log position of the lowest request that is not settled at ``parent_step``. ``settings`` are those of the
    configuration that decide what this learner does, by table and key; empty from learners that did not publish them.
    ``restart`` is the order of a person (``learner.restart_from``) that it follows; one order is followed by one lineage.
    """

    lineage: str
    worker: str
    parent: str = ""
    parent_step: int = 0
    floor: int = 0
    seed: int = 0
    nonce: str = ""
    settings: dict[str, dict[str, bool | int | float | str]] = msgspec.field(default_factory=dict)
    restart: str = ""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An episode that was settled without being trained, and why: its outcome, or a reason of the learner's."""

    episode_id: str
    reason: str


class StepTrained(Message, frozen=True, kw_only=True):
    """One optimizer step: the episodes that it consumed, those settled without training since the step before, and what
    was measured. ``version`` is the policy version that it produced.

    ``digests`` has for each of ``episodes`` the BLAKE2b-128 of what the trainer was given of it: token ids, loss mask,
    log-probabilities, versions and advantages; empty from learners that did not publish them.

    ``rewards`` are those of episodes that were judged with their group, by episode: these were trained, not their results'.
    ``scores`` are the judge's of them: each reward is that of the result and the score, weighted.

    ``differences`` has for each of ``episodes`` the mean size of the difference between the sampler's and the trainer's
    log-probability of its tokens that the newest weights sampled, in nats; -1 where there are none, and empty from learners
    that do not measure it.

    ``token_record`` is the BLAKE2b-128 of the file beside the log that holds, of each token that was trained, the trainer's
    log-probability and what the step did with it; empty if none was written.
    """

    lineage: str
    step: int
    version: int
    episodes: tuple[str, ...]
    excluded: tuple[Exclusion, ...] = ()
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    digests: tuple[bytes, ...] = ()
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    scores: dict[str, float] = msgspec.field(default_factory=dict)
    differences: tuple[float, ...] = ()
    token_record: bytes = b""


class CheckpointStored(Message, frozen=True, kw_only=True):
    """A checkpoint that resume may start from: ``file`` is complete and synced when this is published, ``sha256`` (hex)
    that of its index.

    No learner asks for an episode of a group below ``first_open_group`` any more, except of those that the log holds unsettled.
    ``restarts`` are the orders of a person that lineages have followed so far: the log may no longer hold their beginnings.
    """

    lineage: str
    step: int
    version: int
    file: str
    floor: int
    sha256: str = ""
    first_open_group: int = 0
    restarts: tuple[str, ...] = ()


class EvaluationFinished(Message, frozen=True, kw_only=True):
    """Held-out tasks played with one policy version. ``success`` is the share of graded episodes that are one by
    their environment's word, or by a reward of 1 or more; ``successes`` is how many (-1: not said), so that the share of all
    episodes is known too. ``tasks`` are different ones; 0: not said."""

    lineage: str
    step: int
    version: int
    name: str
    episodes: int
    graded: int
    success: float
    mean_reward: float
    temperature: float
    successes: int = -1
    tasks: int = 0

    @property
    def success_of_all(self) -> float:
        """The share of all episodes that are a success: one without a grade is none. NaN if unknown."""
        return self.successes / max(self.episodes, 1) if self.successes >= 0 else math.nan


class TrainingFinished(Message, frozen=True, kw_only=True):
    """The lineage reached its last step; no further steps follow unless a later run asks for more. ``more``: another such entry
    follows, with what did not fit into this one; without it training has not finished."""

    lineage: str
    step: int
    version: int
    excluded: tuple[Exclusion, ...] = ()
    more: bool = False
