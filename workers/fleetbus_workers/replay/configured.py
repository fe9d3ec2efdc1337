"""The configuration that a recording was made with, as far as this fleetbus knows its settings, made fit for a replay."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetbus.config.fields import tables
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus.recording import Recording

NEVER_SECONDS = 1e6
"""A replayed environment worker waits for its recorded Action: it must not ask others for it."""


def configuration_of(recording: Recording) -> Configuration:
    """Settings of the recorded run. Unknown ones are left out; raises `UserError` when a value does not fit."""
    known: dict[str, dict[str, Any]] = {}
    for name, settings in tables().items():
        found = recording.header.configuration.get(name, {})
        known[name] = {key: value for key, value in found.items() if key in settings}
    try:
        configuration = msgspec.convert(known, Configuration)
    except msgspec.ValidationError as error:
        raise UserError(f"{recording.path}: its configuration cannot be used: {error}") from error
    replace = msgspec.structs.replace
    return replace(
        configuration,
        run=replace(configuration.run, name=recording.run),
        nats=replace(configuration.nats, url="", max_bytes=4 << 30),
        limits=replace(configuration.limits, late=NEVER_SECONDS),
    )
