"""Every setting as one flat list, read off the Structs in `fleetbus.config.settings`: its names, its type, its help.

Above it are `load` (values from files, variables and flags) and the command line (which makes flags of it). Pure.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.config.table import Settings

VARIABLE_PREFIX = "FLEETBUS_"
REPEATABLE = frozenset({"run.environment", "run.pool", "run.seats", "episode.seat_limits"})
"""Settings that may be given several times, or as a list; the value is text with one line per item."""

TABLES = frozenset({"inference.vllm"})
"""Settings that may be a table of their own in a file; the value is its JSON."""


class InvalidValue(ValueError):
    """A value that its setting does not take; the message says what it takes."""


MAX_WHOLE_NUMBER = 1 << 53
"""Of settings without a limit of their own: products and sums with it still fit into messages."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One key of one table. ``annotation`` is the type with its limits, ``base`` the type without them."""

    table: str
    key: str
    annotation: Any
    base: Any
    limits: msgspec.Meta
    default: Any

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}"

    @property
    def flag(self) -> str:
        return f"--{self.table}-{self.key}".replace("_", "-")

    @property
    def variable(self) -> str:
        return f"{VARIABLE_PREFIX}{self.table}_{self.key}".upper()

    @property
    def description(self) -> str:
        return self.limits.description or self.key.replace("_", " ").capitalize()

    @property
    def is_repeatable(self) -> bool:
        return self.name in REPEATABLE

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it takes, empty if it takes other things."""
        return typing.get_args(self.base) if typing.get_origin(self.base) is Literal else ()

    def describe_allowed(self) -> str:
        """The values that it takes, in words: ``a whole number, at least 1``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.limits.title:
            return self.limits.title
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.base]
        return ", ".join([kind, *_describe_bounds(self.limits)])

    def convert(self, value: object, *, text: bool) -> Any:
        """``value`` as this setting's type; ``text`` if it came as a string that spells it. Raises `InvalidValue`."""
        if self.is_repeatable and isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
            value = "\n".join(value)
        if self.name in TABLES and isinstance(value, Mapping):
            value = msgspec.json.encode(value).decode()
        try:
            converted = msgspec.convert(value, self.annotation, strict=not text)
        except msgspec.ValidationError as error:
            raise InvalidValue(self.describe_allowed()) from error
        if isinstance(converted, float) and not math.isfinite(converted):
            raise InvalidValue(self.describe_allowed())
        if isinstance(converted, int) and abs(converted) > MAX_WHOLE_NUMBER and self.limits.le is None:
            raise InvalidValue(f"{self.describe_allowed()}, at most {MAX_WHOLE_NUMBER}")
        return converted


def _describe_bounds(limits: msgspec.Meta) -> list[str]:
    words = (("above", limits.gt), ("at least", limits.ge), ("below", limits.lt), ("at most", limits.le))
    return [f"{word} {bound}" for word, bound in words if bound is not None]


def _split(annotation: object) -> tuple[object, msgspec.Meta]:
    if typing.get_origin(annotation) is not Annotated:
        return annotation, msgspec.Meta()
    base, *rest = typing.get_args(annotation)
    return base, next((item for item in rest if isinstance(item, msgspec.Meta)), msgspec.Meta())


def _build_table_settings(table: str, struct: type[Settings]) -> dict[str, Setting]:
    annotations = typing.get_type_hints(struct, include_extras=True)
    settings = {}
    for field in msgspec.structs.fields(struct):
        base, limits = _split(annotations[field.name])
        settings[field.name] = Setting(
            table=table, key=field.name, annotation=annotations[field.name], base=base, limits=limits, default=field.default
        )
    return settings


@cache
def tables() -> Mapping[str, Mapping[str, Setting]]:
    """The settings of every table, by table and key, in the order of their definition."""
    hints = typing.get_type_hints(Configuration)
    return {table: _build_table_settings(table, hints[table]) for table in Configuration.__struct_fields__}


def list_settings() -> list[Setting]:
    """Every setting, table by table."""
    return [setting for table in tables().values() for setting in table.values()]
