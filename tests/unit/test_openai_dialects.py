"""Answers of servers, as far as they can be trained on: numbers that are none are refused, however JSON spells them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetbus_workers.inference.openai.dialects import CompletionsDialect, Dialect, GenerateDialect, MalformedResponse


def answered(dialect: Dialect, logprob: str) -> dict[str, Any]:
    """One token as that server streams it; Python's parser knows numbers that JSON has not."""
    if dialect.name == "generate":
        logprobs = f'{{"content": [{{"logprob": {logprob}}}]}}'
    else:
        logprobs = f'{{"token_logprobs": [{logprob}]}}'
    chunk: dict[str, Any] = json.loads(f'{{"choices": [{{"token_ids": [7], "logprobs": {logprobs}}}]}}')
    return chunk


@pytest.mark.parametrize("dialect", [GenerateDialect(), CompletionsDialect()], ids=lambda dialect: str(dialect.name))
@pytest.mark.parametrize("logprob", ["NaN", "-Infinity", "Infinity", "-1e999", "null", '"-1.0"'])
def test_a_log_probability_that_is_no_finite_number_is_refused(dialect: Dialect, logprob: str) -> None:
    assert dialect.parse_chunk(answered(dialect, "-0.5")).logprobs == [-0.5]
    with pytest.raises(MalformedResponse, match="not a number"):
        dialect.parse_chunk(answered(dialect, logprob))
