"""The settings that a recording may choose of its replay: numbers and switches, never code, addresses or files.

A recording is a file from anywhere, and its header has the settings of the run. Every setting that is free text can name
something to be run, called, read or written, so none is taken from the header but those listed here; new settings are
refused until somebody lists them. What a role cannot do without has to be named by whoever replays, or the recording trusted.
"""

import os
import re
from pathlib import Path

import msgspec

from fleetbus.config.engines import ENGINES
from fleetbus.config.run_folder import policy_folder_below, run_folder
from fleetbus.config.seats import SeatSetting, list_trained_seats
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus_workers.environment.keyed_specs import parse_keyed_specs

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_POOL = r"([\w.:/-]{1,128}=)?[A-Za-z0-9_-]{1,128}"

HARMLESS_TEXT = {
    "run.policy": _NAME,
    "run.pool": re.compile(rf"{_POOL}(\n{_POOL}){{0,99}}"),
    "run.seats": re.compile(r"([A-Za-z0-9_-]{1,128}=[!-~]{1,2000}(\n|\Z)){0,64}"),
    "episode.seat_limits": re.compile(r"([A-Za-z0-9_-]{1,128}\.max_(turns|tokens)=\d{1,9}(\n|\Z)){0,128}"),
    "run.name": _NAME,
    "learner.requested_by": _NAME,
    "learner.restart_from": re.compile(r"(start|\d{1,9})(/[A-Za-z0-9_]{1,64})?"),
    "reward.weights": re.compile(r"[A-Za-z0-9_.,=+ -]{0,2000}"),
    "trainer.device": re.compile(r"auto|cpu|cuda(:\d{1,3})?|mps"),
    "trainer.lora_target_modules": re.compile(r"[A-Za-z0-9_.,-]{1,1000}"),
}
"""Free text that names nothing outside, by setting, and the whole form that it may have."""

BUILT_IN = re.compile(r"(warehouse|coding|(scripted|colours)(:\d{1,4})?)")
"""Environments that run nothing but what fleetbus ships, verifiers and policies' code in the sandbox excepted."""

MAX_NUMBERS = {
    "inference.max_num_seqs": 1024,
    "inference.slots": 4096,
    "inference.max_model_len": 1 << 20,
    "inference.threads": os.cpu_count() or 1,
    "environment.slots": 4096,
    "environment.session_slots": 4096,
    "learner.groups": 1 << 16,
    "learner.group_size": 1 << 16,
}
"""Numbers that take memory or processes, by setting; a higher one is lowered to this."""

TRUST = "or trust the recording, if it is your own: --trust-recording"


def restrict_recorded_choices(
    configuration: Configuration, recording: Recording, *, role: str, environment: object
) -> Configuration:
    """The recorded configuration without what a foreign file may not choose. ``environment`` is what the caller named.

    Raises `UserError` if the role needs something that the recording alone names.
    """
    run = configuration.run
    if role == "environment" and environment is None and not are_built_in(run.environment):
        raise UserError(
            f"{recording.path} was made with the environment {run.environment!r}, which a file does not choose: name it with "
            f"--environment, {TRUST}"
        )
    if role == "inference" and not ENGINES[configuration.inference.engine].is_local:
        raise UserError(
            f"{recording.path} was made with the engine {configuration.inference.engine}, which calls servers with your keys: "
            f"replay it on a machine with engine torch, {TRUST}"
        )
    return take_harmless_settings(configuration)


def choose_model(recorded: str, named: Path | None, recording: Recording, *, trusted: bool) -> str:
    """The model folder to use, empty for the one that ships; raises `UserError` if only the recording names one."""
    if named is not None or trusted or not recorded:
        return str(named or recorded)
    raise UserError(
        f"{recording.path} was made with the model {recorded!r}, which a file does not choose: --model DIR, {TRUST}"
    )


def are_built_in(environment: str) -> bool:
    """True for an environment that ships, or several by key that all do."""
    return all(BUILT_IN.fullmatch(spec) is not None for spec in parse_keyed_specs(environment).values())


def find_trained_seat(run: RunSettings, policy: str) -> SeatSetting | None:
    """The seat that trains ``policy``; None for the run's own, also if it is empty. Raises `UserError` for any other."""
    seats = {seat.policy: seat for seat in list_trained_seats(run)}
    if policy in ("", run.policy):
        return None
    if policy not in seats:
        raise UserError(
            f"--policy {policy} is trained by no learner of this run: name one of {', '.join((run.policy, *seats))}"
        )
    return seats[policy]


def find_run_weights(recording: Recording, policy: str = "") -> dict[str, Path]:
    """Weights of the same run on this machine, by file name: where `up` puts those of its own policy, or of the ``policy`` of a
    seat, wherever the recording says they are."""
    folder = run_folder(RunSettings(name=recording.run))
    return list_files((policy_folder_below(folder, policy) if policy else folder).weights)


def list_files(folder: Path) -> dict[str, Path]:
    """The files of a folder by name, links left out; none if it is not there."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {path.name: path for path in found if path.is_file() and not path.is_symlink()}


def take_harmless_settings(configuration: Configuration) -> Configuration:
    """The recorded configuration with defaults for free text that is not listed above, and bounded numbers."""
    defaults = Configuration()
    tables: dict[str, object] = {}
    for table in configuration.__struct_fields__:
        recorded, default = getattr(configuration, table), getattr(defaults, table)
        changes: dict[str, object] = {}
        for key in recorded.__struct_fields__:
            name, value = f"{table}.{key}", getattr(recorded, key)
            if isinstance(value, str) and _is_free_text(type(recorded), key):
                form = HARMLESS_TEXT.get(name)
                if form is None or form.fullmatch(value) is None:
                    changes[key] = getattr(default, key)
            elif name in MAX_NUMBERS:
                changes[key] = min(value, MAX_NUMBERS[name])
        tables[table] = msgspec.structs.replace(recorded, **changes)
    return msgspec.structs.replace(configuration, **tables)


def _is_free_text(table: type[msgspec.Struct], key: str) -> bool:
    """False for a setting that has a fixed list of values."""
    (field,) = (each for each in msgspec.inspect.type_info(table).fields if each.name == key)  # type: ignore[attr-defined]
    kind = field.type
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    return not isinstance(kind, msgspec.inspect.LiteralType)
