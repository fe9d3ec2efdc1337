"""The effective configuration: defaults < recipe < the run's earlier start < TOML file < ``FLEETBUS_*`` variables < flags.

Every mistake is one `UserError` that names where it stands, the key, the value and what is allowed. Reads files, nothing
else; the caller says which variables and flags there are.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.config.check import check_configuration
from fleetbus.config.fields import VARIABLE_PREFIX, InvalidValue, Setting, list_settings, tables
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE

DEFAULT_FILE = "fleetbus.toml"
"""Read from the working folder when no file is named."""

NOT_SETTINGS = frozenset({"FLEETBUS_NATS_SERVER"})
"""Variables with our prefix that configure something else: here, which nats-server program is started."""

_PLACE = ("name", "folder")
"""Of `RunSettings`: where the run's files are."""

_CREDENTIALS = re.compile(
    r"(?<=://)[^/?#,\s]*@"  # the last @ of the authority ends it: a password may hold others
    r"|(?<=://)[^/?#,\s:@]*:(?!\d+(?:[^\w]|$))[^,\s]*@"  # a password with a slash, after what is no port
    r"|(?:^|(?<=,))[^/?#,\s:@]+:[^/?#,\s]*@"  # an address without a scheme
)


class LoadedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, and for each given setting, its origin (``fleetbus.toml: learner.steps``)."""

    configuration: Configuration
    given: dict[str, str]


class _SourcedValue(msgspec.Struct, frozen=True):
    value: Any
    origin: str


def load_configuration(
    *,
    file: Path | None = None,
    variables: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    typed: Mapping[str, str] | None = None,
    earlier: Callable[[RunSettings], Mapping[str, Any] | None] | None = None,
    recipe: Mapping[str, object] | None = None,
) -> LoadedConfiguration:
    """Merge the sources. ``flags`` are by setting name (``learner.steps``), strings or converted, ``typed`` the names of those
    flags where they are not the long ones; ``earlier`` finds the tables that the same run was last started with, once its name
    and folder are known; ``recipe`` are tables that give way to all of these. Raises `UserError`."""
    proposed = _from_tables(recipe or {}, "the recipe")
    given: dict[str, _SourcedValue] = {}
    if file is not None:
        given.update(_from_tables(read_tables(file), file.name))
    given.update(_from_variables(variables or {}))
    given.update(_from_flags(flags or {}, typed or {}))
    configuration = _assemble({**proposed, **given})
    if earlier and (tables_before := earlier(configuration.run)):
        before = _from_tables(tables_before, "the run's config.json")
        for key in _PLACE:  # the file may be in a folder that was copied, renamed or moved
            before[f"run.{key}"] = _SourcedValue(getattr(configuration.run, key), "the run's folder")
        configuration = _assemble({**before, **given})
    check_configuration(configuration)
    origins = {name: item.origin for name, item in {**proposed, **given}.items()}
    return LoadedConfiguration(configuration=configuration, given=origins)


def find_default_file(folder: Path) -> Path | None:
    """``fleetbus.toml`` in ``folder``, if there is one."""
    file = folder / DEFAULT_FILE
    return file if file.is_file() else None


def read_tables(file: Path) -> dict[str, object]:
    """The tables of a TOML file, or of a ``.json`` file written by `dump_configuration`. Raises `UserError`."""
    try:
        content = file.read_bytes()
        decoded = msgspec.json.decode(content) if file.suffix == ".json" else tomllib.loads(content.decode())
    except OSError as error:
        raise UserError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, *UNREADABLE) as error:
        raise UserError(f"{file.name} cannot be parsed: {error}") from error
    if not isinstance(decoded, dict):
        raise UserError(f"{file.name} contains no tables")
    return decoded


def dump_configuration(configuration: Configuration) -> bytes:
    """The configuration as JSON that `read_tables` reads, without passwords in URLs."""
    tables = msgspec.to_builtins(configuration)
    tables["nats"]["url"] = strip_credentials(configuration.nats.url)
    tables["run"]["tasks"] = strip_credentials(configuration.run.tasks)
    return msgspec.json.format(msgspec.json.encode(tables), indent=2) + b"\n"


def flatten_configuration(configuration: Configuration) -> dict[str, Any]:
    """The same by name (``learner.steps``), for dashboards; several values of one setting are one text."""
    shared = msgspec.json.decode(dump_configuration(configuration))
    return {
        f"{table}.{key}": ", ".join(map(str, value)) if isinstance(value, list) else value
        for table, values in shared.items()
        for key, value in values.items()
    }


def strip_credentials(url: str) -> str:
    """``url`` (or several, comma separated) without user names, passwords and tokens."""
    return _CREDENTIALS.sub("", url)


def _from_tables(content: Mapping[str, object], file: str) -> dict[str, _SourcedValue]:
    found: dict[str, _SourcedValue] = {}
    for table, values in content.items():
        if table not in tables():
            raise UserError(f"{file}: unknown table [{_format_value(table)}]; {_suggest_table(table)}")
        if not isinstance(values, Mapping):
            raise UserError(f"{file}: {table} is a table: write [{table}] with keys below it")
        for key, value in values.items():
            setting = _find_setting(table, key, file)
            found[setting.name] = _convert(setting, value, f"{file}: {setting.name}", text=False)
    return found


def _from_variables(variables: Mapping[str, str]) -> dict[str, _SourcedValue]:
    by_variable = {setting.variable: setting for setting in list_settings()}
    found: dict[str, _SourcedValue] = {}
    for variable, value in variables.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in NOT_SETTINGS:
            continue
        if setting := by_variable.get(variable):
            found[setting.name] = _convert(setting, value, variable, text=True)
        else:
            _reject_variable(variable, by_variable)
    return found


def _reject_variable(variable: str, known: Iterable[str]) -> None:
    """Refuse what must be a mistake: a known table's prefix, or a name close to a setting's. Others may belong to other
    programs."""
    has_table_prefix = variable.startswith(tuple(f"{VARIABLE_PREFIX}{table.upper()}_" for table in tables()))
    near = difflib.get_close_matches(variable, list(known), n=1, cutoff=0.6 if has_table_prefix else 0.9)
    if near:
        raise UserError(f"unknown variable {variable}; did you mean {near[0]}?")
    if has_table_prefix:
        raise UserError(f"unknown variable {variable}; `fleetbus up --help` lists the settings")


def _from_flags(flags: Mapping[str, object], typed: Mapping[str, str]) -> dict[str, _SourcedValue]:
    by_name = {setting.name: setting for setting in list_settings()}
    return {
        name: _convert(by_name[name], value, typed.get(name, by_name[name].flag), text=isinstance(value, str))
        for name, value in flags.items()
    }


def _find_setting(table: str, key: str, file: str) -> Setting:
    settings = tables()[table]
    if key in settings:
        return settings[key]
    near = (
        difflib.get_close_matches(key, list(settings), n=1, cutoff=0.8)
        or [setting.name for setting in list_settings() if setting.key == key]
        or difflib.get_close_matches(key, list(settings), n=1, cutoff=0.6)
    )
    hint = f"did you mean {near[0]}?" if near else "it has " + ", ".join(settings)
    raise UserError(f"{file}: unknown key {_format_value(key)} in [{table}]; {hint}")


def _suggest_table(name: str) -> str:
    if near := difflib.get_close_matches(name, list(tables()), n=1, cutoff=0.6):
        return f"did you mean [{near[0]}]?"
    if keys := [setting for setting in list_settings() if setting.key == name]:
        return f"did you mean {keys[0].key} in [{keys[0].table}]?"
    return "the tables are " + ", ".join(tables())


def _convert(setting: Setting, value: object, origin: str, *, text: bool) -> _SourcedValue:
    try:
        return _SourcedValue(setting.convert(value, text=text), origin)
    except InvalidValue as error:
        shown = f'"{_format_value(value)}"' if isinstance(value, str) and not text else _format_value(value)
        raise UserError(f"{origin} = {shown} is not allowed: it takes {error}") from error


def _format_value(value: object) -> str:
    shown = strip_credentials(value) if isinstance(value, str) and value.isprintable() else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _assemble(given: Mapping[str, _SourcedValue]) -> Configuration:
    values: dict[str, dict[str, object]] = {table: {} for table in tables()}
    for name, item in given.items():
        table, _, key = name.partition(".")
        values[table][key] = item.value
    return msgspec.convert(values, Configuration)
