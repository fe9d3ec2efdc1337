"""The end of an attempt, as its runner keeps it: what becomes a result once there is a verdict. Pure data."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from fleetbus.core.algorithms.reward_components import find_reward_problem
from fleetbus.core.episode.history import Turn
from fleetbus_schemas import GRADED, EpisodeRequested, EpisodeSeat, Outcome
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.base import Verdict
from fleetbus_workers.environment.episode.seats import EpisodeSeats
from fleetbus_workers.environment.episode.stages import DEADLINE_PASSED, to_printable
from fleetbus_workers.environment.failure_location import clean_error

FEW_TURNS = 2
"""An episode whose tokens were used up in so few turns says what they were used for."""


NO_CALL_READ = "no tool call could be read"
SAID_CHARS = 120
"""Most of what a policy wrote instead."""


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, before or after its verdict."""

    outcome: Outcome
    error_class: str = ""
    error: str = ""
    reward: float | None = None
    location: str = ""
    traceback: str = ""
    note: str = ""
    components: dict[str, float] = {}
    transcript: str = ""
    seats: Mapping[str, float | None] = {}


def apply_verdict(
    conclusion: Conclusion, verdict: Verdict, *, seats: EpisodeSeats, location: str, max_abs_reward: float
) -> Conclusion:
    """The conclusion with its grade; ``verifier_unknown`` if the verdict, or that of all seats, is none."""
    problem, error = _find_problem(verdict, seats.describe(verdict.seats, verdict.reward), max_abs_reward)
    if not problem:
        return msgspec.structs.replace(
            conclusion,
            reward=verdict.reward,
            components=verdict.components,
            transcript=_make_encodable(verdict.transcript),
            seats=verdict.seats,
        )
    return Conclusion(
        outcome="verifier_unknown",
        error_class=problem,
        error=to_printable("; ".join(filter(None, (error, conclusion.note)))),
        location=location,
        components=verdict.components,
        transcript=_make_encodable(verdict.transcript),
    )


def _find_problem(verdict: Verdict, seats: tuple[EpisodeSeat, ...], limit: float) -> tuple[str, str]:
    """The error class of what keeps the verdict from being a grade, and the words for it; both empty if it is one."""
    if verdict.reward is None:
        return "no_verdict", verdict.reason
    if not math.isfinite(verdict.reward):
        reason = f"; {verdict.reason}" if verdict.reason else ""
        return "no_verdict", f"verify: the reward is {verdict.reward}, which is no grade{reason}"
    if problem := find_reward_problem([verdict.reward], limit):
        return problem, f"the verdict is {verdict.reward:g}"
    rewards = {seat.name: seat.reward for seat in seats if seat.reward is not None}
    if seats and not rewards:
        return "no_verdict", f"no seat has a reward; of {seats[0].name}: {seats[0].reason}"
    for name, reward in rewards.items():
        if problem := find_reward_problem([reward], limit):
            return problem, f"the verdict of the seat {name} is {reward:g}"
    return "", ""


def describe_seats(conclusion: Conclusion, seats: EpisodeSeats) -> tuple[EpisodeSeat, ...]:
    """The seats as the result carries them."""
    if conclusion.outcome not in GRADED:
        return seats.describe_equal(None, conclusion.outcome)
    return seats.describe(conclusion.seats, conclusion.reward)


def _make_encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def note_unread(conclusion: Conclusion, turns: Sequence[Turn]) -> Conclusion:
    """Say of an episode that was cut short, in which no tool was called, what the policy wrote last."""
    if conclusion.outcome != "truncated" or conclusion.note or not turns or any(turn.action.tool_calls for turn in turns):
        return conclusion
    said = clean_error(turns[-1].action.text)  # before it is cut: a part of a secret is not recognized as one
    shown = repr(said if len(said) <= SAID_CHARS else f"{said[:SAID_CHARS]}...")
    played = f"its {len(turns)} turns" if len(turns) > 1 else "its turn"
    advice = "give a --model that writes some, or environment.examples"
    note = f"{NO_CALL_READ} in {played}: {advice}; the policy writes {shown}"
    return msgspec.structs.replace(conclusion, note=to_printable(note))


def grade_timeout(conclusion: Conclusion, reward: float | None, turns: int) -> Conclusion:
    """Grade a time-out that was given a ``reward``: a truncated episode, if the policy sampled anything in it."""
    if conclusion.outcome != "timeout" or reward is None or not turns:
        return conclusion
    return msgspec.structs.replace(
        conclusion, outcome="truncated", reward=reward, note=conclusion.error, error="", traceback=""
    )


def conclude_without_room(
    turns: Sequence[Turn], request: EpisodeRequested, seats: EpisodeSeats, tokens_left: int, lack: str
) -> Conclusion:
    """The policy's tokens are used up, or those or the turns of a seat. No work of the policy is in an episode without a turn:
    a grade would say nothing of it. ``lack`` is what the inference worker said of it."""
    error_class, limit = seats.describe_limit(tokens_left)
    if not turns:
        error = _describe_no_room("; ".join(filter(None, (limit, lack))), request.max_tokens)
        return Conclusion(outcome="verifier_unknown", error_class="prompt_too_long", error=error)
    note = limit or _describe_used_tokens(turns, request)
    return Conclusion(outcome="truncated", error_class=error_class or "tokens", note=note)


def _describe_no_room(lack: str, limit: int) -> str:
    reason = lack or f"it uses up the {limit:,} tokens of the episode, or those that the model takes"
    return f"the prompt leaves no room for a turn: {reason}; shorten it, or raise the limit"


def _describe_used_tokens(turns: Sequence[Turn], request: EpisodeRequested) -> str:
    """The use of the tokens, if they were used up in the first or the second turn."""
    if len(turns) > FEW_TURNS:
        return ""
    prompt, limit = count_tokens(turns[0].action.prompt_delta), request.max_tokens
    return (
        f"its tokens were used up in turn {len(turns)} of {request.max_turns}: the first prompt took {prompt:,} of "
        f"{limit:,} (episode.max_episode_tokens)"
    )


TIMED_OUT = Conclusion(outcome="timeout", error_class="episode_timeout", error=DEADLINE_PASSED)
