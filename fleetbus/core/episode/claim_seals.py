"""A graded result has to open the seal of the newest claim: so it is of the process that claimed the episode. Pure.

All environment workers of a run share a key, and so may store a result of any episode. A claim has the SHA-256 of a secret that
its process keeps to itself; the result that it ends in has the secret. Compare-and-set makes the first result the only one, so
the secret is of no use to whoever reads it there
(docs/decisions/0246-results-open-the-seal-of-their-claim.md). Learner, clients and audit hold results against it.
"""

from __future__ import annotations

import hashlib

import msgspec

from fleetbus_schemas import GRADED, AttemptReleased, AttemptStarted, EpisodeFinished

NOT_OF_CLAIM = "not_of_claim"
"""Why such an episode is not trained."""

MAX_OPEN = 1 << 20
"""Claims whose results are waited for; beyond this the oldest are forgotten, and their results taken as they are."""


def name_claim(secret: str) -> str:
    """The public name of the claim that a secret is for, which tells nothing of it."""
    return hashlib.sha256(f"nonce {secret}".encode()).hexdigest()[:16]


def make_seal(secret: str) -> bytes:
    """The seal of a claim."""
    return hashlib.sha256(secret.encode()).digest()


def opens(seal: bytes, result: EpisodeFinished) -> bool:
    """True if a result may stand on a claim with this seal. Whoever ends an episode without a verdict claims nothing by it, and
    claims of before have no seal."""
    return not seal or result.outcome not in GRADED or make_seal(result.opens) == seal


def without_verdict(result: EpisodeFinished) -> EpisodeFinished:
    """A result of somebody who did not claim the episode, as who evaluates takes it: nobody knows its worth."""
    return msgspec.structs.replace(
        result, outcome="verifier_unknown", reward=None, turn_rewards=(), seats=(), success=None, error_class=NOT_OF_CLAIM
    )


class ClaimSeals:
    """The seals of the newest claims, by episode. Enter what stands on ``episode.<episode>`` in the order of the log."""

    def __init__(self) -> None:
        self._seals: dict[str, bytes] = {}

    def enter(self, entry: AttemptStarted | AttemptReleased | EpisodeFinished | None) -> bool:
        """False for a graded result that is not of the process that holds the claim."""
        if isinstance(entry, AttemptStarted):
            self._seals.pop(entry.episode_id, None)
            self._seals[entry.episode_id] = entry.seal
            if len(self._seals) > MAX_OPEN:
                del self._seals[next(iter(self._seals))]
        if isinstance(entry, EpisodeFinished):
            return opens(self._seals.pop(entry.episode_id, b""), entry)
        return True
