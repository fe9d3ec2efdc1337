"""Ids of traces and spans from what every message of an episode carries, so that all who trace it agree without a header.

The run and the episode name an episode, its deadline one of the same name in an earlier run of that name.
A step-wise session is named by the run and the session alone: no call of it carries more.
Ids are as W3C Trace Context wants them: 16 and 8 bytes, never all zero. Pure.
"""

from hashlib import blake2b

TRACE_BYTES, SPAN_BYTES = 16, 8
ROOT = "episode"
"""The path of the first span of an episode or of a session."""


def trace_id(run: str, episode_id: str, deadline_ns: int) -> int:
    """The trace of an episode; all three are fields of its request and of each of its observations."""
    return _hash(f"{run}/{episode_id}/{deadline_ns}", TRACE_BYTES)


def compute_session_trace_id(run: str, session: str) -> int:
    """The trace of a step-wise session; no episode can have a name with a slash."""
    return trace_id(run, f"session/{session}", 0)


def span_id(trace: int, path: str = ROOT) -> int:
    """A span by its place in the trace, such as ``attempt/1/turn/3/generate``: what happens again has the same id."""
    return _hash(f"{trace:032x}/{path}", SPAN_BYTES)


def build_turn_path(attempt: int, turn: int) -> str:
    """The path of one turn."""
    return f"attempt/{attempt}/turn/{turn}"


def build_call_path(key: str) -> str:
    """The path of one call of a session; a repeated call has the same key."""
    return f"call/{key}"


def format_traceparent(trace: int, path: str = ROOT) -> str:
    """The header with which something that is not of fleetbus, a tool server say, joins its spans below one of these."""
    return f"00-{trace:032x}-{span_id(trace, path):016x}-01"


def is_sampled(trace: int, ratio: float) -> bool:
    """True if a trace is in a share of all, by its id: the same ratio always gives the same answer."""
    return (trace & ((1 << 64) - 1)) < round(ratio * (1 << 64))


def _hash(text: str, size: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=size, person=b"fleetbus trace").digest(), "big") or 1
