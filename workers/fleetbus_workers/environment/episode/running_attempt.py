"""An attempt while it runs in a slot, and why one is not started any more."""

from __future__ import annotations

from typing import TypeVar

import anyio

from fleetbus.concurrency.deadlines import Deadline
from fleetbus.core.episode.claim_seals import name_claim
from fleetbus.core.episode.claims import EpisodeState
from fleetbus_schemas import AttemptStarted, EpisodeRequested
from fleetbus_workers.environment.episode.policy_client import PolicyClient

Scope = TypeVar("Scope", anyio.CancelScope, Deadline)


class RunningAttempt:
    """One episode in one slot. ``nak_delay_seconds``: nak the request with that delay at the end (None: never). ``is_final``:
    one more loss would make the episode poison."""

    __slots__ = (
        "_ended",
        "_scope",
        "_state",
        "attempt",
        "cancelled_by",
        "claim",
        "claim_sequence",
        "handed_back",
        "is_final",
        "is_stopped",
        "nak_delay_seconds",
        "nonce",
        "policy_client",
        "request",
        "secret",
        "sequence",
    )

    def __init__(
        self, request: EpisodeRequested, sequence: int, secret: str, episode_state: EpisodeState, *, is_final: bool
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.secret = secret
        """Known to this process alone until the result has it."""
        self.nonce = name_claim(secret)
        self.attempt = episode_state.attempts + 1
        self.is_final = is_final
        self._scope: anyio.CancelScope | Deadline | None = None
        self.is_stopped = False
        """Whether `stop` was called."""
        self._state: EpisodeState | None = episode_state
        self._ended: anyio.Event | None = None  # hardly any attempt is waited for
        self.claim: AttemptStarted | None = None
        self.claim_sequence = 0
        self.policy_client: PolicyClient | None = None
        self.cancelled_by: str | None = None
        """Who asked for it to be ended; None: nobody."""
        self.handed_back = False
        self.nak_delay_seconds: float | None = None

    def take_state(self) -> EpisodeState:
        """Take the state of the episode before this attempt; it is kept no longer."""
        assert self._state is not None, "it was taken before"
        state, self._state = self._state, None
        return state

    def enter(self, scope: Scope) -> Scope:
        """The scope in which the attempt runs, one after another: `stop` cancels the newest."""
        self._scope = scope
        if self.is_stopped:
            scope.cancel()
        return scope

    def stop(self) -> None:
        """Cancel what the attempt does, now and from now on."""
        self.is_stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def wait_until_ended(self) -> None:
        """Until `mark_ended`."""
        if self._ended is None:
            self._ended = anyio.Event()
        await self._ended.wait()

    def mark_ended(self) -> None:
        if self._ended is not None:
            self._ended.set()


def describe_expiry(episode_state: EpisodeState) -> str:
    """The reason why a request was not started: either episodes are slow, or too many of them are queued."""
    if episode_state.claims:
        return "its deadline passed while no worker ran it"
    return (
        "its deadline passed before it was started: more episodes are queued than the environment workers start within "
        "limits.episode; raise it, add slots or workers, or ask for fewer (learner.groups, learner.max_staleness)"
    )
