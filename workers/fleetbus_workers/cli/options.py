"""Settings as flags: per command only the tables that it reads, the usual ones in short form, help grouped by table.

Values stay text here; `fleetbus.config.load` converts and checks them, so that every source gets the same messages.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from fleetbus.config.fields import Setting, tables
from fleetbus.config.load import LoadedConfiguration, find_default_file, load_configuration
from fleetbus.config.run_folder import read_earlier_configuration
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import InvalidName, check_name

SHORT_FLAGS = {
    "run.name": "--run",
    "run.seed": "--seed",
    "run.model": "--model",
    "run.tasks": "--tasks",
    "run.environment": "--environment",
    "run.seats": "--seat",
    "episode.seat_limits": "--seat-limit",
    "nats.url": "--nats",
    "learner.steps": "--steps",
    "learner.restart_from": "--restart-from",
}
"""Settings that are common enough for a flag without their table's name; the long form works too."""

NAMING_ENVIRONMENTS = frozenset({"up", "environment"})
"""Commands whose help lists the kinds of environments."""

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}
_SEPARATOR = "__"
_TYPED = f"{__name__}.typed"

F = TypeVar("F", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """`click.FloatRange` for finite numbers: NaN is within every range of its own."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, parameter, context)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", parameter, context)


SECONDS = NumberRange(0, min_open=True)
SECONDS_OR_NONE = NumberRange(0)
"""Time limits; with the second one 0 means not to wait at all."""


class SettingOption(click.Option):
    """A flag that stands for one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        kind: dict[str, Any] = {"metavar": _METAVARS.get(setting.base)}
        if setting.choices:
            kind = {"type": click.Choice(setting.choices)}
        if setting.is_repeatable:
            kind["multiple"] = True
        super().__init__(
            [_format_parameter_name(setting), *_list_flags(setting)], default=None, help=_format_help(setting), **kind
        )


class SettingsCommand(click.Command):
    """A command whose help has one section per table, the short flags first."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[_TYPED] = {argument.partition("=")[0] for argument in args}
        return super().parse_args(context, args)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                sections.setdefault(_find_section(parameter), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if self.name in NAMING_ENVIRONMENTS:
            from fleetbus_workers.environment.specs import ADAPTERS

            with formatter.section("Environments (--environment SPEC)"):
                formatter.write_dl([(adapter.forms, adapter.description) for adapter in ADAPTERS])


def settings_options(*names: str) -> Callable[[F], F]:
    """Decorator: ``--config`` and a flag per setting of these tables, short ones first."""
    settings = [setting for name in names for setting in tables()[name].values()]
    settings.sort(key=lambda setting: setting.name not in SHORT_FLAGS)

    def add(function: F) -> F:
        options: list[click.Option] = [_build_config_option(), *(SettingOption(setting) for setting in settings)]
        known: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        known.extend(reversed(options))
        return function

    return add


def load_settings(
    values: dict[str, Any], *, earlier: bool = True, recipe: Mapping[str, object] | None = None
) -> LoadedConfiguration:
    """The effective configuration for the flags that click collected, on top of what the run was last started with, unless
    ``earlier`` is False; raises `UserError`. A ``recipe`` takes the place of the file of the working folder."""
    given = {name: value for name, value in values.items() if _SEPARATOR in name and value not in (None, ())}
    flags = {name.replace(_SEPARATOR, "."): value for name, value in given.items()}
    file = values.get("config") or (find_default_file(Path.cwd()) if recipe is None else None)
    before = read_earlier_configuration if earlier else None
    typed = _find_typed_flags(given)
    return load_configuration(file=file, variables=os.environ, flags=flags, typed=typed, earlier=before, recipe=recipe)


def _find_typed_flags(parameters: Iterable[str]) -> dict[str, str]:
    """By setting the flag that was given, so that errors name it: the one that was typed, where the command remembers."""
    context = click.get_current_context(silent=True)
    if context is None:
        return {}
    typed = context.meta.get(_TYPED, frozenset())
    flags = {
        option.name: [*option.opts, *option.secondary_opts]
        for option in context.command.params
        if isinstance(option, click.Option)
    }
    return {
        name.replace(_SEPARATOR, "."): next((flag for flag in flags[name] if flag in typed), flags[name][0])
        for name in parameters
        if name in flags
    }


def _build_config_option() -> click.Option:
    return click.Option(
        ["--config"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file with settings (default: fleetbus.toml in the working folder, if there is one)",
    )


def _format_parameter_name(setting: Setting) -> str:
    return f"{setting.table}{_SEPARATOR}{setting.key}"


def _list_flags(setting: Setting) -> Sequence[str]:
    long = setting.flag
    if setting.base is bool:
        return [f"{long}/--no-{long.removeprefix('--')}"]
    return [SHORT_FLAGS[setting.name], long] if setting.name in SHORT_FLAGS else [long]


def _format_help(setting: Setting) -> str:
    shown = {True: "yes", False: "no"}.get(setting.default, setting.default) if setting.base is bool else setting.default
    return f"{setting.description} [{shown}]" if shown != "" else setting.description


def _find_section(parameter: click.Parameter) -> str:
    if not isinstance(parameter, SettingOption) or parameter.setting.name in SHORT_FLAGS:
        return "Options"
    return f"Settings of {parameter.setting.table}"


def validate_name(kind: str, name: str) -> str:
    """``name`` unchanged if it can be a token of a subject; raises `UserError` that names ``kind``."""
    try:
        return check_name(kind, name)
    except InvalidName as error:
        raise UserError(str(error)) from error
