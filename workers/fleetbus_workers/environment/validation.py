"""The edge of environments: what `reset`, `step` and `verify` return is checked here before the worker relies on it. Pure.

A wrong type that got further would show only where somebody else decodes the message that it went into, or nowhere.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

import msgspec

from fleetbus.core.algorithms.reward_components import MAX_COMPONENTS, MAX_NAME_CHARACTERS
from fleetbus_schemas import ChatMessage, ContextChange, ToolSpec
from fleetbus_schemas.chat import Role
from fleetbus_schemas.names import is_name
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.environment.base import Ahead, Start, Step, TurnLimits, Verdict
from fleetbus_workers.environment.failure_location import locate_method
from fleetbus_workers.environment.normalization import to_plain_number

T = TypeVar("T")
ROLES = frozenset(get_args(Role))
MAX_COUNT = (1 << 31) - 1

BATCH_DIMENSIONS = 4
"""Of an array that holds several images; one of three is a single image."""


class InvalidReturn(TypeError):
    """An environment returned what its protocol does not allow; ``location`` is the method that did."""

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(message)
        self.location = location


def validate_return(kind: type[T], value: object, call: str, environment: object = None) -> T:
    """Validate what ``call`` of ``environment`` returned, with plain numbers. ``kind``: that of the protocol, or dict.

    Numbers stay NaN or infinite if they are: what that means is the caller's to say. Raises `InvalidReturn`.
    """
    try:
        return _validate(kind, value, call)
    except InvalidReturn as error:
        raise InvalidReturn(str(error), locate_method(environment, call)) from None


def check_images(observed: Start | Step, call: str, environment: object) -> None:
    """Raises `InvalidReturn`, located in ``call`` of ``environment``, for images that are none or a single one."""
    images, where = observed.images, f"{type(observed).__name__}.images"
    is_sequence = isinstance(images, Sequence) and not isinstance(images, (str, bytes, bytearray, memoryview))
    if not is_sequence and getattr(images, "ndim", 0) != BATCH_DIMENSIONS:
        given = f"must be a tuple of images, not {type(images).__name__}; one image is (image,)"
        raise InvalidReturn(f"{where} {given}", locate_method(environment, call))


def check_messages(messages: Iterable[ChatMessage], where: str = "an environment's messages") -> tuple[ChatMessage, ...]:
    """The messages of an environment; raises `InvalidReturn` when they are something else."""
    is_plain = type(messages) is tuple
    if not is_plain and (isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable)):
        raise InvalidReturn(f"{where} must be a tuple of ChatMessage, not {_describe(messages)}")
    checked = tuple(messages)
    for index, message in enumerate(checked):
        _check_message(message, f"{where}[{index}]")
    return checked


def _validate(kind: type[T], value: object, call: str) -> T:
    if not isinstance(value, kind):
        raise InvalidReturn(f"{call} returned {_describe(value)}; it must return {kind.__name__}")
    changed: dict[str, object] = {}
    match value:
        case Start():
            changed = {
                "messages": check_messages(value.messages, "Start.messages"),
                "tools": _check_tools(value.tools, "Start.tools"),
                "offered": _check_tools(value.offered, "Start.offered"),
                "prompted": _check_count(value.prompted, "Start.prompted"),
                "seat": _check_seat(value.seat, "Start.seat"),
                "ahead": _check_ahead(value.ahead, "Start.ahead"),
            }
            _check_info(value.info, "Start.info")
        case Step():
            messages = check_messages(value.messages, "Step.messages")
            is_told = value.context is not None or value.seat or value.ahead
            if not is_told and messages is value.messages and _has_plain_fields(value):
                return cast("T", value)
            changed = {
                "messages": messages,
                "reward": _check_number(value.reward, "Step.reward"),
                "terminated": _check_flag(value.terminated, "Step.terminated"),
                "truncated": _check_flag(value.truncated, "Step.truncated"),
                "tool_calls": _check_count(value.tool_calls, "Step.tool_calls"),
                "tool_errors": _check_count(value.tool_errors, "Step.tool_errors"),
                "seat": _check_seat(value.seat, "Step.seat"),
                "tools": _check_tools(value.tools, "Step.tools"),
                "ahead": _check_ahead(value.ahead, "Step.ahead"),
            }
            _check_info(value.info, "Step.info")
            if value.context is not None:
                _check_context(value.context, "Step", has_messages=bool(messages or value.terminated or value.truncated))
        case Verdict():
            changed = {
                "reward": None if value.reward is None else _check_number(value.reward, "Verdict.reward"),
                "components": _check_components(value.components),
                "seats": _check_seats(value.seats),
            }
            for name in ("reason", "transcript"):
                if not isinstance(getattr(value, name), str):
                    raise InvalidReturn(f"Verdict.{name} must be text, not {_describe(getattr(value, name))}")
        case Ahead():
            return cast("T", _check_told(value, call))
        case _:
            return value
    return cast("T", msgspec.structs.replace(value, **changed))


def _has_plain_fields(step: Step) -> bool:
    """True if there is nothing to change, as with nearly every step."""
    return (
        type(step.reward) is float
        and type(step.terminated) is type(step.truncated) is bool
        and type(step.tool_calls) is type(step.tool_errors) is int
        and type(step.info) is dict
        and 0 <= step.tool_calls <= MAX_COUNT
        and 0 <= step.tool_errors <= MAX_COUNT
    )


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, ChatMessage):
        raise InvalidReturn(f"{where} must be a ChatMessage, not {_describe(message)}")
    if message.role not in ROLES:
        raise InvalidReturn(f"{where}.role is {message.role!r}; it must be one of {', '.join(get_args(Role))}")
    if not isinstance(message.content, str):
        _check_fields(message, ChatMessage, where)


def _check_tools(tools: object, where: str) -> tuple[ToolSpec, ...]:
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise InvalidReturn(f"{where} must be a tuple of ToolSpec, not {_describe(tools)}")
    checked = tuple(tools)
    for index, tool in enumerate(checked):
        if not isinstance(tool, ToolSpec):
            raise InvalidReturn(f"{where}[{index}] must be a ToolSpec, not {_describe(tool)}")
        _check_fields(tool, ToolSpec, f"{where}[{index}]")
    return checked


def _check_fields(value: object, kind: type, where: str) -> None:
    """Fields as they are annotated: a Struct does not check them when it is made."""
    try:
        msgspec.convert(msgspec.to_builtins(value), kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidReturn(f"{where}: {error}") from None


def _check_context(change: object, where: str, *, has_messages: bool) -> None:
    if not isinstance(change, ContextChange):
        raise InvalidReturn(f"{where}.context must be a ContextChange, not {_describe(change)}")
    _check_fields(change, ContextChange, f"{where}.context")
    if change.keep_turns < 0:
        raise InvalidReturn(f"{where}.context.keep_turns is {change.keep_turns}; it must be 0 or more")
    if change.keep_turns and change.resume is not None:
        raise InvalidReturn(f"{where}.context has keep_turns and resume; a context continues in one way")
    begins_prompt = not change.keep_turns and change.resume is None
    if change.tools and not begins_prompt:
        raise InvalidReturn(f"{where}.context.tools come with a new prompt only: keep_turns = 0, and no resume")
    if begins_prompt and not has_messages:
        raise InvalidReturn(f"{where}.context begins a new prompt, and {where}.messages are empty")


def _check_ahead(ahead: object, where: str) -> tuple[Ahead, ...]:
    if isinstance(ahead, (str, bytes, Mapping)) or not isinstance(ahead, Iterable):
        raise InvalidReturn(f"{where} must be a tuple of Ahead, not {_describe(ahead)}")
    return tuple(_check_told(told, f"{where}[{index}]") for index, told in enumerate(ahead))


def _check_told(told: object, where: str) -> Ahead:
    if not isinstance(told, Ahead):
        raise InvalidReturn(f"{where} must be an Ahead, not {_describe(told)}")
    _check_seat(told.seat, f"{where}.seat")
    messages, tools = check_messages(told.messages, f"{where}.messages"), _check_tools(told.tools, f"{where}.tools")
    if told.context is not None:
        _check_context(told.context, where, has_messages=bool(messages))
    if not isinstance(told.limits, TurnLimits):
        raise InvalidReturn(f"{where}.limits must be TurnLimits, not {_describe(told.limits)}")
    _check_fields(told.limits, TurnLimits, f"{where}.limits")
    return msgspec.structs.replace(told, messages=messages, tools=tools)


def _check_number(value: Any, where: str) -> float:
    try:
        return to_plain_number(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidReturn(f"{where} must be a number, not {_describe(value)}") from None


def _check_components(components: object) -> dict[str, float]:
    """A component that is no finite number would reach advantages by its weight."""
    if not isinstance(components, Mapping) or len(components) > MAX_COMPONENTS:
        raise InvalidReturn(f"Verdict.components must be at most {MAX_COMPONENTS} numbers by name, not {_describe(components)}")
    checked = {}
    for name, value in components.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            raise InvalidReturn(
                f"Verdict.components: a name must be printable text of at most {MAX_NAME_CHARACTERS} characters"
            )
        checked[name] = _check_number(value, f"Verdict.components[{name!r}]")
        if not math.isfinite(checked[name]):
            raise InvalidReturn(f"Verdict.components[{name!r}] is {checked[name]}; it must be a finite number")
    return checked


def _check_seat(name: object, where: str) -> str:
    if not isinstance(name, str) or (name and not is_name(name)):
        raise InvalidReturn(f"{where} must be a name of 1 to 128 letters, digits, '-' or '_', not {_describe(name)}")
    return name


def _check_seats(seats: object) -> dict[str, float | None]:
    if not isinstance(seats, Mapping) or len(seats) > MAX_SEATS:
        raise InvalidReturn(f"Verdict.seats must be at most {MAX_SEATS} numbers by name, not {_describe(seats)}")
    return {
        _check_seat(name, "Verdict.seats"): None if value is None else _check_number(value, f"Verdict.seats[{name!r}]")
        for name, value in seats.items()
    }


def _check_count(value: Any, where: str) -> int:
    try:
        count = operator.index(value.item() if hasattr(value, "item") else value)
    except TypeError:
        raise InvalidReturn(f"{where} must be a whole number, not {_describe(value)}") from None
    if not 0 <= count <= MAX_COUNT:
        raise InvalidReturn(f"{where} must be a number from 0 to {MAX_COUNT}")
    return count


def _check_flag(value: object, where: str) -> bool:
    """Flags of NumPy and 0 or 1 will do; every text would be true."""
    if value is None or isinstance(value, (str, bytes, Mapping, list, tuple)):
        raise InvalidReturn(f"{where} must be true or false, not {_describe(value)}")
    return bool(value)


def _check_info(value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise InvalidReturn(f"{where} must be a dict, not {_describe(value)}")


def _describe(value: object) -> str:
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, (str, int, float)) else ""
    name = type(value).__name__
    return f"{name} {text[:60]}" if text else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
