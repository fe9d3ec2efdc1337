"""Logs whose Actions are not what was sampled: hashes, log-probabilities, versions. See `test_audit_forgeries.py`."""

from __future__ import annotations

import math
from typing import Any

from fleetbus_schemas import VersionSpan
from fleetbus_schemas.tokens import pack_logprobs
from tests.support.log_builder import LogBuilder, compute_history_hash


def history_hash_of_garbage(log_builder: LogBuilder) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.finish("a", [log_builder.act("a", 0, history_hash=b"garbage")])


def history_hash_of_other_turns(log_builder: LogBuilder) -> None:
    """Each Action follows from its own observation, but the second observation not from the first Action."""
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    first = log_builder.act("a", 0)
    log_builder.observe("a", 1, history_hash=compute_history_hash(2))
    second = log_builder.act("a", 1, history_hash=compute_history_hash(3))
    log_builder.finish("a", [first, second])


def play_changed(log_builder: LogBuilder, **changes: Any) -> None:
    log_builder.request("a")
    log_builder.claim("a")
    log_builder.observe("a", 0)
    log_builder.finish("a", [log_builder.act("a", 0, **changes)])


def logprobs_missing(log_builder: LogBuilder) -> None:
    play_changed(log_builder, logprobs=b"")


def logprobs_not_finite(log_builder: LogBuilder) -> None:
    play_changed(log_builder, logprobs=pack_logprobs([-1.0, math.nan]))


def versions_missing(log_builder: LogBuilder) -> None:
    play_changed(log_builder, versions=())


def versions_of_some_tokens(log_builder: LogBuilder) -> None:
    play_changed(log_builder, versions=(VersionSpan(version=0, start=1, stop=2),))
