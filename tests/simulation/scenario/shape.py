"""The shape of a scenario of the simulation: size of the deployment, network faults, fault schedule. Drawn in
`tests.simulation.scenario.drawing`.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

FaultKind = Literal[
    "crash",
    "pause",
    "cut",
    "drain",
    "join",
    "restart_server",
    "second_learner",
    "fill_log",
    "cancel",
    "spoil_checkpoint",
    "elect",
    "step_clock",
    "renew_consumers",
    "slow_consumer",
    "fill_lanes",
    "break_disk",
    "lose_checkpoints",
    "rewind_checkpoints",
    "garbage",
    "pause_requests",
    "set_clock",
    "fill_disk",
    "leave",
    "visit",
]
"""From ``elect`` on they take part with ``faults="all"`` only, ``garbage`` and ``pause_requests`` with drawn configurations. In
scenarios of days a role ``leave``s for a while, and a client comes for a ``visit``."""

FaultSet = Literal["usual", "all", "swarm", "power", "rare", "learners"]
"""``swarm``: all faults, and a configuration that is drawn, too: tiny limits, short deadlines, few lanes, long episodes.
``power``: the usual ones, and a server that loses its newest entries. ``rare``: as ``swarm``, and what hardly ever happens.
``learners``: as ``all`` or as ``swarm``, always with a second policy that is trained."""

ROLES = ("environment", "inference", "learner")
"""Roles that every fleet has; some have a recorder, too."""

POLICY = "default"
OTHER_SEAT = "seat-1"
OTHER_POLICY = "simulator"
"""The seat that another policy plays, in worlds with one, and that policy's name unless it is trained."""

ROOMY_LOG_BYTES = 1 << 30
"""More than any run stores."""


class ScheduledFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault at ``at`` seconds; ``pick`` selects the target among the processes alive then."""

    kind: FaultKind
    at: float
    seconds: float
    role: str
    pick: int


class PowerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """At ``at`` seconds the server loses what it stored in the last ``lost_seconds``, and is down for ``down_seconds``.
    ``everywhere``: all workers end with it."""

    at: float
    lost_seconds: float
    down_seconds: float
    everywhere: bool = True


class NetworkFaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities per event on the network, and the longest delay in seconds."""

    delayed: float = 0.0
    longest_delay_seconds: float = 0.0
    publish_lost: float = 0.0
    answer_lost: float = 0.0
    delivery_lost: float = 0.0
    delivery_repeated: float = 0.0
    ack_lost: float = 0.0
    call_lost: float = 0.0
    publish_late: float = 0.0
    """Messages that are stored up to ``longest_late_seconds`` after they were sent, whatever their sender did meanwhile."""
    longest_late_seconds: float = 20.0
    read_behind: float = 0.0
    """Reads that a replica answers which is up to ``longest_lag_seconds`` behind."""
    longest_lag_seconds: float = 1.5
    read_lost: float = 0.0
    """Reads that nobody answers in time (drawn configurations)."""


class FaultProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities of what environments and engines do: per stage of an environment, per episode, per turn."""

    hang: float = 0.0
    fail: float = 0.0
    slow: float = 0.0
    odd_verdict: float = 0.0
    tool_error: float = 0.1
    diverge: float = 0.0
    engine_failed: float = 0.0
    weights_rejected: float = 0.0
    poison_episode: float = 0.0
    poison_observation: float = 0.0


CALM = FaultProfile()


STEP_SECONDS = 20.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a world is, and how long it is looked at. ``work``: steps of episodes' environments and their limit take so many
    times as long. ``timers``: so many times as long workers wait between heartbeats, renewals and looks
    (`tests.simulation.timers`). It lives for ``lasts_seconds`` at least, and is over by ``horizon_seconds``: longer than the
    most hopeless of drawn configurations train, in which one group of ten is good for anything and admission waits a minute
    before each. ``most_entries``: more than the log may hold beside a recorder, 0 for any number.
    """

    work: float = 1.0
    timers: float = 1.0
    lasts_seconds: float = 0.0
    horizon_seconds: float = 14_400.0
    check_seconds: float = 5.0
    trim_seconds: float = 2.0
    late_seconds: float = 1.0
    most_entries: int = 0

    @property
    def step_seconds(self) -> float:
        """The limit of one step of an environment."""
        return STEP_SECONDS * self.work


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one simulated run that its seed decides beforehand.

    ``settle_seconds``: what was settled for so long leaves the log. ``late_copies``: copies of requests that left it are stored
    again. In groups of two, one failure leaves a group without a baseline. ``blocking_seconds``: the longest half of what
    training, saving weights or writing a checkpoint takes. ``heals_at``: from then on nothing more goes wrong, and every
    wait has a bound. ``segments``: share of steps after which an environment changes the policy's context. ``seats``: so many
    parts of an episode act, each in its own context; 0: it has none. ``gateways_host``:
    gateways have environments in their own process. ``archive_seconds``: the longest half of what a write of the archive takes.
    ``strangers``: clients that ask of sessions what nobody may.
    """

    seed: int
    environment_workers: int = 2
    inference_workers: int = 2
    environment_slots: int = 16
    inference_slots: int = 16
    steps: int = 4
    groups: int = 5
    group_size: int = 4
    checkpoint_every: int = 2
    max_staleness: int = 1
    evaluation_episodes: int = 4
    duplicate_window_seconds: float = 120.0
    drain_seconds: float = 20.0
    idle_seconds: float = 1800.0
    blocking_seconds: float = 1.0
    replayable: bool = True
    recorder: bool = False
    session_clients: int = 0
    gateway_clients: int = 0
    gateways_host: bool = False
    archive_seconds: float = 0.05
    rollout_clients: int = 0
    strangers: int = 0
    monitors: int = 0
    session_slots: int = 8
    weights_in_bucket: bool = False
    evaluation_every: int = 0
    lanes: int = 12
    episode_seconds: float = 600.0
    stale_groups: Literal["drop", "keep", "wait"] = "drop"
    dynamic_sampling: bool = False
    mask_truncated: bool = False
    credit_per_turn: bool = False
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch"] = "grpo"
    max_attempts: int = 3
    max_turns: int = 6
    turns: tuple[int, ...] = (2, 3, 4, 4, 5, 6, 7)
    exclusions_per_entry: int = 0
    tasks: int = 24
    eval_greedy: bool = True
    min_group_size: int = 2
    heals_at: float = math.inf
    settle_seconds: float = 30.0
    late_copies: bool = False
    network_faults: NetworkFaultRates = NetworkFaultRates()
    fault_profile: FaultProfile = FaultProfile()
    fault_schedule: tuple[ScheduledFault, ...] = ()
    segments: float = 0.0
    ahead: float = 0.0
    """Share of steps after which an environment tells turns ahead, which are sampled side by side."""
    seats: int = 0
    other_seat: bool = False
    """Another policy, of two more inference workers, plays one of them."""
    trained_seat: bool = False
    """A learner of its own trains that policy."""
    seat_limits: str = ""
    """The setting ``episode.seat_limits``."""
    compaction: Literal["off", "drop", "summarise"] = "off"
    log_bytes: int = ROOMY_LOG_BYTES
    power_losses: tuple[PowerLoss, ...] = ()
    pace: Pace = Pace()
    rare: bool = False
    """Environments cannot be made, or hold something elsewhere; callers flood one session, or a gateway's own worker; operators
    mistype."""

    @property
    def is_calm(self) -> bool:
        """True where nothing goes wrong."""
        is_served = self.network_faults == NetworkFaultRates() and self.fault_profile == FaultProfile()
        return is_served and not self.fault_schedule and not self.power_losses

    @property
    def other_policy(self) -> str:
        """Who plays the other seat; empty without one. A policy that is trained is called like its seat."""
        return (OTHER_SEAT if self.trained_seat else OTHER_POLICY) if self.other_seat else ""

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Those that have learners."""
        return (POLICY, OTHER_SEAT) if self.other_seat and self.trained_seat else (POLICY,)

    @property
    def session_faults(self) -> FaultProfile:
        """Steps of sessions do not hang where the limit of a step is hours: no caller waits so long."""
        return msgspec.structs.replace(self.fault_profile, hang=0.0) if self.pace.work > 1 else self.fault_profile
