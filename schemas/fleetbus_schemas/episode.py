"""One episode: what is asked for, who runs it, how it ended."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from fleetbus_schemas.message import Count, Message
from fleetbus_schemas.names import InnerName, Name, OptionalName
from fleetbus_schemas.seat import EpisodeSeat, SeatLimit
from fleetbus_schemas.segment import EpisodeSegment

Split = Literal["train", "eval"]
"""``train`` episodes enter the books of training, ``eval`` episodes never do."""

Outcome = Literal["completed", "truncated", "env_failed", "verifier_unknown", "timeout", "lost", "cancelled", "stale"]
"""How an episode ended. Only `GRADED` outcomes carry a reward and enter advantages."""

GRADED: frozenset[str] = frozenset({"completed", "truncated"})
"""Outcomes that the policy is responsible for: it finished, or it used up its turns or tokens."""


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task that an environment is opened with; one entry of a tasks file (Fleet JSON names in parentheses).

    ``key`` (``key``/``task_key``), ``env`` (``env_key``/``env_id``/``env``), ``version`` (``env_version``/``version``),
    ``verifier`` is Python source (``verifier_code``/``verifier_func``), ``config`` is all else that the environment reads,
    ``dataset_version`` what the dataset is called that the task was read from (``v0.2``, or a hash of its bytes).
    """

    key: str
    env: str = ""
    prompt: str = ""
    version: str = ""
    modality: str = "tool_use"
    env_variables: dict[str, Any] = msgspec.field(default_factory=dict)
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    seed: int | None = None
    verifier: str | None = None
    dataset_version: str = ""


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of the sampler. ``temperature`` 0 is greedy; ``max_tokens`` bounds one turn; ``stop`` are token strings
    that end a turn besides the model's end-of-turn token; ``seed`` makes the episode's sampling repeatable.

    ``top_p``, ``top_k`` (0: all tokens) and ``min_p`` (a share of the likeliest token's probability) leave tokens out;
    ``presence_penalty``, ``frequency_penalty`` and ``repetition_penalty`` (1: none) make repeated ones less likely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


DISTORTING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Sampling settings that, unless they are as they are by default, make another distribution than the policy's at its
temperature."""


class SeatPolicy(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``seat`` of an episode is played by another ``policy``, sampled as ``sampling`` says. The episode's requester never
    trains its tokens; if it is ``trained``, a learner of that policy does. With a ``version`` that one of the request's own
    policy plays, as its opponent: who serves ``policy`` answers from it alone."""

    seat: str
    policy: InnerName
    sampling: SamplingSettings = SamplingSettings()
    trained: bool = False
    version: int | None = None


class EpisodeRequested(Message, frozen=True, kw_only=True):
    """Learner (or any client) → environment pool, on ``task.<pool>.<episode>``, expecting sequence 0 there.

    ``group_size`` episodes share the group id (0: unknown). ``deadline_ns`` is server time (Unix nanoseconds): the episode
    has an outcome by then in every case. ``max_tokens`` bounds what all turns add, in all segments.
    ``earliest_sequence`` is the first log position at which it can stand, as its author knew when it was made (0: unknown).
    ``timeout_reward`` is what an episode gets that has sampled tokens when its time is up; None: no grade. ``policy`` plays all
    seats but those in ``seats``, whose tokens do not count in ``max_tokens`` where they are not trained. ``seat_limits`` bound
    single seats beside the episode's limits, at most one for each.
    """

    grown: ClassVar[bool] = True

    episode_id: Name
    group_id: str
    sample_index: int
    split: Split
    task: Task
    policy: Name
    pinned_version: int | None = None
    sampling: SamplingSettings = SamplingSettings()
    max_turns: int = 50
    max_tokens: int = 30_720
    deadline_ns: int
    lineage: str = ""
    policy_version: int = 0
    group_size: int = 0
    earliest_sequence: int = 0
    timeout_reward: float | None = None
    seats: tuple[SeatPolicy, ...] = ()
    seat_limits: tuple[SeatLimit, ...] = ()

    @property
    def policies(self) -> tuple[str, ...]:
        """All that its turns are asked of, each once."""
        return tuple(dict.fromkeys((self.policy, *(seat.policy for seat in self.seats))))

    def find_policy(self, seat: str) -> str:
        """The policy that plays a seat."""
        return next((each.policy for each in self.seats if each.seat == seat), self.policy)

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Those whose learners train it, each once."""
        return tuple(dict.fromkeys((self.policy, *(seat.policy for seat in self.seats if seat.trained))))


ClaimReason = Literal["fresh", "handed_back", "taken_over"]


class AttemptStarted(Message, frozen=True, kw_only=True):
    """Environment worker → ``episode.<episode>``, expecting the last entry there: the claim, and the fencing token.

    ``nonce`` identifies one's own claim when the answer to the publish was lost. ``seal`` is the SHA-256 of a secret that a
    graded result of this attempt has to have; empty from workers that do not know it. ``resumed_at_turn`` is the first
    turn that this attempt plays itself; earlier turns were re-applied from the log (replayable environments).
    """

    episode_id: Name
    attempt: Count
    worker: Name
    nonce: str
    lane: Name
    reason: ClaimReason = "fresh"
    resumed_at_turn: int = 0
    request_sequence: int = 0
    seal: bytes = b""


class AttemptReleased(Message, frozen=True, kw_only=True):
    """Environment worker → ``episode.<episode>``, expecting its own claim: a release, so that the hand-back of a draining
    worker does not count as a take-over."""

    episode_id: Name
    attempt: Count
    worker: Name
    next_turn: int = 0


class ActionReference(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The position in the log of an Action of the trained history, and on which environment lane's subject."""

    sequence: int
    lane: InnerName
    turn: Count


UntrainedReason = Literal["not_delivered", "side_call", "seat"]
"""Why a turn is not trained: the agent that asked for it never had its answer, or asked for it beside its task, or its seat
has no reward."""


class UntrainedTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A turn of the trained history whose sampled tokens are not trained."""

    turn: int
    reason: UntrainedReason


class EpisodeFinished(Message, frozen=True, kw_only=True):
    """Environment worker (or the requester, for a timeout) → learner, on ``episode.<episode>``, expecting its own claim.

    ``reward`` is None unless ``outcome`` is graded. ``actions`` are the Actions of the trained history in turn order; their
    token arrays live there and only there. ``loss_mask`` has one packed bit per token of prompt delta 0, sampled 0,
    prompt delta 1, ... (``tokens`` bits). ``timings`` are seconds by stage. ``info`` is what the environment returned beside
    its last observation, ``success`` what it says of success there (None: nothing), ``last_observation`` the text of that
    observation, which the policy did not see if the episode ended with it; info and text are cut.

    ``error_location`` is the place in an environment's code that failed, as ``FILE:LINE in FUNCTION``. ``traceback`` stands in
    the first failure of each kind that a worker has, without secrets and of bounded length. ``note`` is what a person should
    know of a graded episode. ``segments`` are those of the trained history by number; empty if there is one only.

    ``reward_components`` are what ``reward`` was made of, by name, before weights: ``verifier``, ``judge`` and what the
    environment's verdict names; empty from workers that did not record them. ``transcript`` is what a judge of whole groups is
    shown; empty without one. ``untrained`` are turns that ``loss_mask`` leaves out, in their order. ``seats`` are those that
    acted, if the environment has several: each is trained with its own reward; ``reward`` is the episode's for all else.
    ``opens`` is the secret of its claim's ``seal``.
    """

    episode_id: Name
    group_id: str
    attempt: Count
    outcome: Outcome
    worker: OptionalName
    split: Split = "train"
    task_key: str = ""
    env: str = ""
    request_sequence: int = 0
    error_class: str = ""
    error: str = ""
    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()
    turns: int = 0
    actions: tuple[ActionReference, ...] = ()
    tokens: int = 0
    loss_mask: bytes = b""
    timings: dict[str, float] = msgspec.field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    attempts: int = 1
    policy_versions: tuple[int, ...] = ()
    dataset_version: str = ""
    success: bool | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    last_observation: str = ""
    error_location: str = ""
    traceback: str = ""
    note: str = ""
    segments: tuple[EpisodeSegment, ...] = ()
    reward_components: dict[str, float] = msgspec.field(default_factory=dict)
    transcript: str = ""
    untrained: tuple[UntrainedTurn, ...] = ()
    seats: tuple[EpisodeSeat, ...] = ()
    opens: str = ""

    @property
    def unrewarded_turns(self) -> frozenset[int]:
        """Turns of its seats that have no reward: they are not trained, and another model may have sampled them."""
        return frozenset(turn for seat in self.seats if seat.reward is None for turn in seat.turns)
