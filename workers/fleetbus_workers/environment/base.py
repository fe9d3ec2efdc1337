"""The protocol of environments: six asynchronous calls, each under a deadline that the worker sets.

The worker above calls them strictly one after another and cancels a call whose time is up; an implementation below talks to
one outside system. `close` is called exactly once, in every case, even after a failed or cancelled `open`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from fleetbus_schemas import (
    Action,
    ChatMessage,
    ContextChange,
    EpisodeRequested,
    Observation,
    SamplingSettings,
    Task,
    ToolOutput,
    ToolSpec,
    UntrainedTurn,
)


class TurnLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one answer beside those of its episode: at most ``max_tokens``, ended by any of the texts ``stop``. See
    docs/decisions/0193."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def apply(self, sampling: SamplingSettings) -> SamplingSettings:
        """The settings of the episode within these limits; its own stops are the first, and may come again."""
        if self == NO_LIMITS:
            return sampling
        tokens = sampling.max_tokens if self.max_tokens is None else min(sampling.max_tokens, self.max_tokens)
        return msgspec.structs.replace(sampling, max_tokens=tokens, stop=(*sampling.stop, *dict.fromkeys(self.stop)))


NO_LIMITS = TurnLimits()


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that a later `Step` will ask for, whatever the policy answers before it: told ahead, it is sampled beside those.

    ``messages``, ``seat``, ``context`` and ``tools`` are those that the step will have; ``context`` begins a new prompt or
    resumes a segment. It stands in a context of its own: what continues the answer to a turn before it cannot be told ahead.
    ``limits`` are those of its answer (`LimitsTurns`).
    """

    messages: tuple[ChatMessage, ...]
    seat: str = ""
    context: ContextChange | None = None
    tools: tuple[ToolSpec, ...] = ()
    limits: TurnLimits = NO_LIMITS


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first messages to the policy: the whole prompt (system and user messages) and the tools, if any.

    ``info`` is for clients that drive the environment step by step; the policy does not see it. ``images`` are a class of one's
    own's: each stands where ``<image>`` stands in a message's text, those without a place follow the last message. A Pillow
    image, the bytes of an image file, or an array (see `fleetbus_workers.environment.images.observation.encode_image_file`).

    Where the first ``prompted`` messages tell the policy of its tools, ``offered`` has these tools: for clients of gateways,
    who are shown the environment and not a prompt that was made for a policy. ``seat`` is the part of the episode that acts
    first, where there are several (docs/environments.md); empty: there is one. ``ahead`` are turns that follow the first one in
    any case, in their order.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    images: Sequence[Any] = ()
    prompted: int = 0
    offered: tuple[ToolSpec, ...] = ()
    seat: str = ""
    ahead: tuple[Ahead, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one action. ``terminated``: the episode reached its end; ``truncated``: the environment cut it short.

    ``messages`` are what the policy sees next; when the episode is over, what there is left to see, for results and clients.
    ``reward`` is this turn's own part of the
    episode's reward, 0 if the environment grades only at the end (see `Verdict`). ``tool_calls`` and ``tool_errors`` count what
    this step did. ``info`` and ``images``: see `Start`; ``success`` (or ``is_success``) in ``info`` says whether the episode is
    a success. ``unrewarded`` says why there is no reward at all, which then counts as 0 in sums and goes out as null; empty if
    there is one. ``output``: what the called tool gave, where ``messages`` say it in words for a policy. ``context``: how the
    policy's context continues, if not by growing. ``seat`` is the part of the episode that acts next, in a context of its own;
    empty: the same as before. When a seat acts for the first time, ``messages`` are its whole prompt, and ``tools`` its tools.
    ``ahead`` are turns that follow the next one in any case, in their order, as far as none was told before.
    """

    messages: tuple[ChatMessage, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    images: Sequence[Any] = ()
    output: ToolOutput | None = None
    context: ContextChange | None = None
    unrewarded: str = ""
    seat: str = ""
    tools: tuple[ToolSpec, ...] = ()
    ahead: tuple[Ahead, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The grade of a finished episode. ``reward`` None means that there is no verdict (never a zero); ``reason`` says why.

    ``reward`` is the total of the episode, the rewards of its steps included: what the steps were not rewarded of it is paid
    with the last one, to the learner's turns and through every gateway. An environment that rewards its steps and has nothing
    to add gives their sum. ``components`` are parts of it by name, recorded in the result; `reward.weights` may weigh them.
    ``transcript`` is for a judge of whole groups. ``seats`` are the rewards of the seats by name:
    each is trained with its own. A seat with None, or one that is not named, is not trained; where none is named, all have
    ``reward``.
    """

    reward: float | None
    reason: str = ""
    components: dict[str, float] = msgspec.field(default_factory=dict)
    transcript: str = ""
    seats: Mapping[str, float | None] = msgspec.field(default_factory=dict)


class FailedVerdict(Verdict, frozen=True, kw_only=True):
    """No verdict because of a mistake in the verifier's code: it raised, or returned no finite number."""


class EnvironmentFailed(Exception):
    """The outside system failed, not the policy: the episode ends ``env_failed`` and trains nothing.

    ``location`` and ``remote_traceback`` are those of the exception in another process that it stands for.
    """

    def __init__(self, *arguments: object, location: str = "", remote_traceback: str = "") -> None:
        super().__init__(*arguments)
        self.location = location
        self.remote_traceback = remote_traceback


class Environment(Protocol):
    """One episode's world. Any exception from `open`, `reset`, `step` or `state` ends the episode as ``env_failed``."""

    replayable: bool
    """True if the same actions on a fresh environment of the same task lead to the same observations."""

    async def open(self, task: Task) -> None:
        """Acquire what the episode needs: a process, a connection, a container."""

    async def reset(self) -> Start:
        """Begin the episode."""

    async def step(self, action: Action) -> Step:
        """Execute one action of the policy. A failing tool is not an exception but part of the observation."""

    async def state(self) -> dict[str, Any]:
        """A JSON-like view of the episode for people and monitors; may be empty."""

    async def verify(self) -> Verdict:
        """Grade the episode; called after the last step and before `close`."""

    async def close(self) -> None:
        """Release everything; never raises for what is already gone."""


@runtime_checkable
class HoldsElsewhere(Protocol):
    """An environment that holds something which outlives a killed worker, as a session on another server."""

    @property
    def held(self) -> str:
        """The resources that it holds now, in words of its own; empty if none."""

    async def release(self, task: Task, held: str) -> None:
        """Release what another environment of this kind held for ``task``; never raises for what is already gone. Called before
        `open`, on an environment that may never be opened."""


class RecordedTurn(NamedTuple):
    """A turn of an earlier attempt: what the policy was shown, and its answer."""

    observed: Observation
    action: Action


@runtime_checkable
class LivesElsewhere(Protocol):
    """An environment whose other side does not end with its worker, as an agent on another machine: it is replayable, but by
    what the log has of it, for the other side has done its part."""

    def assign(self, request: EpisodeRequested, attempt: int, recorded: Sequence[RecordedTurn]) -> None:
        """The episode that it is for, and the turns that were played before this attempt. Called once, before `open`."""


@runtime_checkable
class LimitsTurns(Protocol):
    """An environment that limits single answers of the policy, as an agent does in its calls."""

    @property
    def turn_limits(self) -> TurnLimits:
        """The limits of the answer that comes next."""


@runtime_checkable
class AsksAhead(Protocol):
    """An environment that learns of later turns while the policy is asked, as of the calls of an agent's sub-agents."""

    asks_ahead: bool
    """True if `ask_ahead` is to be called."""

    async def ask_ahead(self) -> Ahead | None:
        """Wait for the next turn that follows those known so far in any case; None if there will be none before the next step.
        Cancelled when the policy has answered: a turn that was not returned then is asked for by a step alone."""


@runtime_checkable
class ShowsWhole(Protocol):
    """An environment that passes on what somebody else says, as an agent, who counts on it."""

    shows_whole: bool
    """True if its messages are not cut to ``environment.observation_bytes``."""


@runtime_checkable
class PacesItself(Protocol):
    """An environment whose step is what another package does between two answers: it has limits of its own, or none."""

    paces_itself: bool
    """True if a step may take as long as the episode (``limits.episode``), whatever ``limits.step`` says."""


@runtime_checkable
class StartsInTurn(Protocol):
    """An environment whose start loads this machine, as that of an agent's program: few start at a time."""

    async def wait_to_start(self) -> None:
        """Wait between ``open`` and ``reset`` until others have started. No limit of a stage counts this time."""


@runtime_checkable
class ReportsUntrained(Protocol):
    """An environment in which not every turn counts as the policy's doing."""

    def list_untrained(self) -> tuple[UntrainedTurn, ...]:
        """The turns that are not trained, in their order. Called when the episode has ended."""


@runtime_checkable
class TaskEnvironmentFactory(Protocol):
    """A factory whose environments depend on the task."""

    def for_task(self, task: Task) -> Environment:
        """The environment of one episode; any exception ends the episode as ``env_failed``."""
