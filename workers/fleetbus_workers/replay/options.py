"""The options of a replay, and the recorded settings that the worker under test runs with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from fleetbus.config.fields import tables
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus_workers.environment.base import Environment
from fleetbus_workers.replay.compare import LOGPROB_TOLERANCE

PATIENCE_SECONDS = 60.0
NEVER_SECONDS = 1e6
"""A replayed environment worker waits for its recorded Action: it must not ask another lane for it."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a replay. ``environment`` is a spec as in ``--environment`` or makes an environment per episode; ``model`` a
    model folder (by default the recorded ones, where `recorded_choices` takes them); ``weights`` a folder with the published
    files; ``speed`` a multiple of the recorded speed, None: as fast as the worker goes; ``ignored`` are further ``Type.field``
    names that may differ. ``patience_seconds`` without an expected message mean that the worker hangs. ``jobs`` processes share
    the episodes; None: one per CPU where that is faster. ``sample_again``: sample every token, even where a forward pass would
    show the same. ``until`` ``batches``: compare the learner's batches without training. ``distinct``: of episodes with the
    same task, actions and outcome, play one. ``policy``: whose Actions an inference worker samples again, that of a trained
    seat (empty: the run's own). ``trusted``: the recording is the caller's own; nothing that names code, addresses or files is
    taken from any other."""

    role: Literal["environment", "inference", "learner"] = "environment"
    environment: str | Callable[[], Environment] | None = None
    model: Path | None = None
    weights: Path | None = None
    speed: float | None = None
    ignored: frozenset[str] = frozenset()
    tolerance: float = LOGPROB_TOLERANCE
    patience_seconds: float = PATIENCE_SECONDS
    jobs: int | None = None
    sample_again: bool = False
    until: Literal["batches", "weights"] = "weights"
    distinct: bool = False
    policy: str = ""
    trusted: bool = False


def read_configuration(recording: Recording) -> Configuration:
    """Settings that the run was last started with; raises `UserError` when a value does not fit."""
    configuration = apply_settings(Configuration(), recording.header.configuration, recording)
    replace = msgspec.structs.replace
    return replace(
        configuration,
        run=replace(configuration.run, name=recording.run),
        nats=replace(configuration.nats, url="", max_bytes=4 << 30),
        limits=replace(configuration.limits, late=NEVER_SECONDS),
    )


def apply_settings(
    configuration: Configuration, recorded: Mapping[str, Mapping[str, object]], recording: Recording
) -> Configuration:
    """``configuration`` with the recorded tables, unknown settings left out; raises `UserError` when a value does not fit."""
    try:
        known = {
            table: msgspec.convert({key: recorded[table][key] for key in recorded[table] if key in settings}, kind)
            for table, settings in tables().items()
            if table in recorded and (kind := type(getattr(configuration, table)))
        }
    except msgspec.ValidationError as error:
        raise UserError(f"{recording.path}: its configuration cannot be used: {error}") from error
    return msgspec.structs.replace(configuration, **known)
