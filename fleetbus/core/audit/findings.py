"""The findings and the report of an audit: kinds of imbalance with the ids they concern, and the books. Pure data."""

import msgspec

from fleetbus.core.audit.operations import Operations

MAX_IDS = 100
"""Ids that are kept per kind; all are counted."""

KINDS: dict[str, str] = {
    "nothing_read": "logs of which nothing was read: an empty log proves nothing",
    "torn": "recordings that are damaged or have no end: what the log had behind it was not read",
    "log_erases": "limits of the stream by which the server removes entries that nobody has settled",
    "checkpoints_ahead": "checkpoints in the run's folder with steps that the log does not have: it lost them",
    "entries_missing": "positions of the log without an entry in the log or the archive",
    "entries_lost": "episodes, and subjects, of which the log lost what was archived: it went back in time",
    "misfiled": "entries whose episode is not that of their subject",
    "requested_twice": "episodes with more than one request",
    "never_requested": "episodes that were claimed, finished or settled without a request, or after they were settled for good",
    "claim_out_of_order": "claims whose attempt does not follow the one before",
    "claim_after_result": "claims on episodes that had a result",
    "release_not_newest": "releases by an attempt that did not hold the episode",
    "second_result": "episodes with more than one result",
    "result_not_newest": "results from an attempt that is not the newest",
    "result_not_of_claim": "graded results that another process stored than the one that had claimed the episode",
    "observed_unclaimed": "turns observed by an attempt that was never claimed",
    "action_unobserved": "actions for a turn that was never observed",
    "action_repeated": "turns of one attempt with more than one action",
    "version_unpublished": "actions of a policy version before its publication",
    "action_missing": "results that name an action that does not exist",
    "actions_not_history": "results whose actions are not the history of their claims",
    "history_hash_wrong": "results with actions whose history hashes do not follow from the tokens before them",
    "segments_wrong": "results whose segments are not those of their actions",
    "seats_wrong": "results whose seats are not those that were asked, or that would train a seat without a reward",
    "seat_limit_wrong": "results in which a seat went beyond its limit, or that end for one that none has or has reached",
    "opponent_wrong": "turns of a league's seat that another version was asked for, or played, than the request names",
    "logprobs_missing": "results with sampled tokens that have no finite log-probability",
    "versions_missing": "results with sampled tokens that are not of one policy version each",
    "loss_mask_length": "results whose loss mask is not as long as their actions have tokens",
    "loss_mask_unsampled": "results that would train tokens that the policy did not sample",
    "reward_not_of_outcome": "graded results without a reward, or others with one",
    "reward_not_finite": "results whose reward, or that of a turn, is no finite number",
    "result_not_of_request": "results whose group or split is not that of their request",
    "version_repeated": "policy versions that were published again",
    "lineage_replaced": "steps trained by a lineage after another had taken over",
    "lineage_unfounded": "lineages that start where no checkpoint that counted was stored, or anew although one was, unordered",
    "steps_lost": "steps that a lineage began behind and that the log does not have: they were trained, and it lost them",
    "step_out_of_order": "steps of the surviving lineage that do not follow the one before",
    "trained_twice": "episodes trained more than once",
    "excluded_twice": "episodes excluded more than once",
    "settled_elsewhere": "episodes settled by the learner of a policy that has no part in them",
    "trained_and_excluded": "episodes that were trained and excluded",
    "excluded_without_reason": "episodes excluded without a reason",
    "exclusion_unfounded": "episodes excluded for a reason that is not so: their outcome, age or group is another",
    "reward_unjudged": "trained rewards that are not those of results, and that no judge's score explains",
    "version_elsewhere": "versions whose address has another name, or another place than others of their lineage, or on the "
    "subject of a league that are none of the policy's",
    "checkpoint_elsewhere": "checkpoints whose folder has another name, or another place than others of their lineage",
    "trained_without_result": "episodes trained without a graded result before",
    "below_floor_unsettled": "episodes below the floor of a checkpoint that were neither trained nor excluded by then",
    "floor_unsettled": "episodes that the floor of the log has passed before they were settled or, without a learner, finished",
    "finished_unsettled": "episodes of whole groups that were neither trained nor excluded when training finished",
    "evaluation_settled": "evaluation episodes that training consumed",
    "digest_missing": "steps without digests of what they trained, so that the log does not prove it",
    "digest_wrong": "trained episodes whose digest is not that of what was sampled",
    "books_open": "sums that differ: requested, and trained + excluded + evaluation + in flight",
}
"""Every kind of imbalance, and what it means."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of imbalance. ``ids`` are the first ones (episodes, versions, steps or positions), ``sequence`` where the
    first was seen (0: nowhere in particular)."""

    kind: str
    meaning: str
    count: int
    ids: tuple[str, ...]
    sequence: int = 0


class Findings(msgspec.Struct):
    """Collects offending ids by kind."""

    _ids: dict[str, dict[str, None]] = {}
    _counts: dict[str, int] = {}
    _sequences: dict[str, int] = {}

    def add(self, kind: str, identifier: str, sequence: int = 0) -> None:
        ids = self._ids.setdefault(kind, {})
        if identifier in ids:
            return
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._sequences.setdefault(kind, sequence)
        if len(ids) < MAX_IDS:
            ids[identifier] = None

    def list_found(self) -> tuple[Finding, ...]:
        """One finding per kind, in the order of `KINDS`."""
        return tuple(
            Finding(
                kind=kind,
                meaning=meaning,
                count=self._counts[kind],
                ids=tuple(self._ids[kind]),
                sequence=self._sequences[kind],
            )
            for kind, meaning in KINDS.items()
            if kind in self._counts
        )


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Every request in exactly one place: requested = trained + excluded + evaluation + in flight.

    In flight are ``waiting`` (no worker has claimed it), ``running`` and ``finished`` (it has a result that training has not
    settled). ``void`` were trained by a lineage that was cut, and are counted elsewhere by what became of them; ``abandoned``
    were settled for good before their lineage was cut, and are nowhere else.
    """

    requested: int = 0
    trained: int = 0
    excluded: dict[str, int] = msgspec.field(default_factory=dict)
    evaluation: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    void: int = 0
    abandoned: int = 0

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running + self.finished

    @property
    def accounted(self) -> int:
        return self.trained + sum(self.excluded.values()) + self.evaluation + self.abandoned + self.in_flight


class Attempts(msgspec.Struct, frozen=True, kw_only=True):
    """Every claim in exactly one place."""

    started: int = 0
    finished: int = 0
    released: int = 0
    superseded: int = 0
    in_flight: int = 0


class SessionBooks(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that callers drove step by step: ``ended`` by how they ended, ``steps`` those of all."""

    opened: int = 0
    open: int = 0
    steps: int = 0
    ended: dict[str, int] = msgspec.field(default_factory=dict)


class ReachedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of the newest lineage."""

    lineage: str
    step: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an audit of the entries up to ``last_sequence``. ``malformed`` entries count and change nothing.
    ``proven`` trained episodes are known to be what was sampled; None unless the audit was a deep one."""

    last_sequence: int
    entries: int
    malformed: int
    books: Books
    attempts: Attempts
    outcomes: dict[str, int]
    observations: int
    actions: int
    versions: int
    steps: int
    lineages: tuple[str, ...]
    findings: tuple[Finding, ...]
    proven: int | None = None
    reached: dict[str, ReachedStep] = msgspec.field(default_factory=dict)
    """By policy the end of its training."""
    unproven: tuple[str, ...] = ()
    """What was not looked at, or cannot be proven from what was read."""
    refused: int = 0
    """Entries below the floor of the log, which change nothing."""
    undelivered: int = 0
    """Turns that results leave out of training, for their agents never had the answers."""
    side_calls: int = 0
    """Turns that results leave out of training, for their agents asked for them beside the task."""
    unrewarded: int = 0
    """Turns that results leave out of training, for their seats have no reward."""
    begins: int = 1
    """The position of the first entry that could be read; those before it were removed by an archive's retention."""
    sessions: SessionBooks = SessionBooks()
    operations: Operations = msgspec.field(default_factory=Operations)
    """What people did to the run, by the keys that did it."""
    trained_by: dict[str, int] = msgspec.field(default_factory=dict)
    """By policy the episodes that its learner trained: one that several train is in the books of each."""

    @property
    def whole(self) -> bool:
        """True if no entry had been removed before it could be read."""
        return self.begins == 1

    @property
    def balanced(self) -> bool:
        """True if the books of the whole log have no finding: those of a part prove nothing of the rest."""
        return not self.findings and self.whole
