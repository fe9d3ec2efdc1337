"""A sampled sequence ended where its text first says one of some words. Pure.

What stands before depends on nothing that comes after, so the tokens that stay are sampled from the same distribution, with the
same log-probabilities, as if the engine had stopped there. See docs/decisions/0193.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from fleetbus_workers.inference.base import Generation

MARGIN_TOKENS = 16
"""Tokens, besides a stop's own, after which a text that is decoded from its middle on is what the whole text has there."""


def end_at_stop(generation: Generation, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Generation:
    """The generation up to the token with which the text, as ``decode`` has it, holds the first of ``stops``; unchanged if it
    holds none."""

    def holds_stop(count: int, start: int = 0) -> bool:
        text = decode(generation.ids[start:count])
        return any(stop in text for stop in stops)

    whole = len(generation.ids)
    if not stops or not holds_stop(whole):
        return generation
    count = _find_count(whole, max(len(stop.encode()) for stop in stops) + MARGIN_TOKENS, holds_stop)
    if not holds_stop(count) or holds_stop(count - 1):  # the tokenizer's text depends on what is farther away
        count = bisect_left(range(whole), True, key=holds_stop)
    spans = [msgspec.structs.replace(span, stop=min(span.stop, count)) for span in generation.versions if span.start < count]
    return Generation(
        ids=generation.ids[:count], logprobs=generation.logprobs[:count], finish_reason="stop", versions=tuple(spans)
    )


def _find_count(whole: int, margin: int, holds_stop: Callable[[int, int], bool]) -> int:
    """Bisect without decoding again what holds no stop: answers are long, and this is the event loop."""
    without, count = 0, whole
    while count - without > 1:
        middle = (without + count) // 2
        if holds_stop(middle, max(without - margin, 0)):
            count = middle
        else:
            without = middle
    return count
