"""A fold of ``episode.<episode>``: holder of the episode, number of losses, outcome. Pure.

Rules 1, 2 and 9 of docs/concepts/delivery.md. The newest claim is the fencing token. A claim without a
release means that the worker was lost during the episode.
"""

from collections.abc import Iterable

import msgspec

from fleetbus.core.episode.claim_seals import opens, without_verdict
from fleetbus_schemas import AttemptReleased, AttemptStarted, EpisodeFinished, EpisodeRequested, Outcome
from fleetbus_schemas.episode import ClaimReason

EpisodeEntry = AttemptStarted | AttemptReleased | EpisodeFinished


class EpisodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one episode: a fold of its subject. ``last_sequence`` is what the next entry has to expect."""

    last_sequence: int = 0
    claims: tuple[AttemptStarted, ...] = ()
    claim_sequence: int = 0
    released: bool = False
    losses: int = 0
    result: EpisodeFinished | None = None

    @property
    def newest(self) -> AttemptStarted | None:
        return self.claims[-1] if self.claims else None

    @property
    def attempts(self) -> int:
        return len(self.claims)

    @property
    def next_reason(self) -> ClaimReason:
        """The reason for which the next attempt would start."""
        if not self.claims:
            return "fresh"
        return "handed_back" if self.released else "taken_over"

    @property
    def result_of_claim(self) -> EpisodeFinished | None:
        """The result as others take it: without its verdict if it does not open the seal of the newest claim."""
        if self.result is None or self.newest is None or opens(self.newest.seal, self.result):
            return self.result
        return without_verdict(self.result)

    def is_poison(self, max_attempts: int) -> bool:
        """True if it was lost with its worker ``max_attempts`` times; hand-backs do not count."""
        return self.result is None and self.losses >= max_attempts

    def is_on_last_attempt(self, max_attempts: int) -> bool:
        """True if it was lost before, and one more loss would make it poison."""
        return self.result is None and 0 < self.losses == max_attempts - 1

    def is_held_by(self, nonce: str) -> bool:
        """True if the newest claim is the one with this nonce and nothing ended or released it."""
        newest = self.newest
        return newest is not None and newest.nonce == nonce and self.result is None and not self.released

    def ends(self, claim: AttemptStarted) -> bool:
        """True if a result, another claim or the claim's own release ended this claim. A standing that was read from before it
        was stored ends nothing."""
        newest = self.newest
        if self.result is not None:
            return True
        if newest is None or newest.attempt < claim.attempt:
            return False
        return newest.nonce != claim.nonce or self.released


def build_result_without_attempt(
    request: EpisodeRequested,
    sequence: int,
    episode_state: EpisodeState,
    *,
    worker: str,
    outcome: Outcome,
    error_class: str,
    error: str = "",
) -> EpisodeFinished:
    """The result of an episode that ``worker`` does not run; ``sequence`` is the request's. It expects the last entry read."""
    return EpisodeFinished(
        episode_id=request.episode_id,
        group_id=request.group_id,
        attempt=episode_state.attempts,
        outcome=outcome,
        worker=worker,
        split=request.split,
        task_key=request.task.key,
        dataset_version=request.task.dataset_version,
        env=request.task.env,
        request_sequence=sequence,
        error_class=error_class,
        error=error,
        attempts=episode_state.attempts,
    )


def build_unstorable_result(result: EpisodeFinished, reason: str) -> EpisodeFinished:
    """The end of an episode whose result has no bytes or too many: its environment failed; what it returned is left out."""
    return EpisodeFinished(
        episode_id=result.episode_id,
        group_id=result.group_id,
        attempt=result.attempt,
        outcome="env_failed",
        worker=result.worker,
        split=result.split,
        task_key=result.task_key,
        dataset_version=result.dataset_version,
        env=result.env,
        request_sequence=result.request_sequence,
        error_class="result_unstorable",
        error=reason,
        attempts=result.attempts,
    )


def fold_episode(entries: Iterable[tuple[int, EpisodeEntry | None]]) -> EpisodeState:
    """The standing after ``entries`` (sequence, message) in log order; the first result is final.

    A message of None stands for an entry that could not be read: it counts as the last one and changes nothing else.
    """
    episode_state = EpisodeState()
    released = 0
    for sequence, entry in entries:
        if episode_state.result is not None:
            break
        match entry:
            case AttemptStarted():
                claims = (*episode_state.claims, entry)
                episode_state = EpisodeState(
                    last_sequence=sequence, claims=claims, claim_sequence=sequence, losses=len(claims) - released
                )
            case AttemptReleased():
                released += 1
                episode_state = msgspec.structs.replace(
                    episode_state, last_sequence=sequence, released=True, losses=episode_state.attempts - released
                )
            case None:
                episode_state = msgspec.structs.replace(episode_state, last_sequence=sequence)
            case finished:
                episode_state = msgspec.structs.replace(episode_state, last_sequence=sequence, result=finished)
    return episode_state
