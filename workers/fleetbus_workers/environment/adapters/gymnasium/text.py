"""A Gymnasium environment in words: names for its actions, and what it shows as text. Blocking, and free of the bus.

Names come from the task, the table below, the environment's own enumeration or its ``get_action_meanings``; numbers and, for
spaces that are no choice of one, JSON are always understood; where an action is a text, so is what was said. Above it is
`adapters.gymnasium.environment`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

ACTION_NAMES: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""By the environment's id without its version: names in the order of its action numbers."""

LEGENDS = {
    "FrozenLake": "You are at the letter in brackets. S: start, F: frozen, H: hole, G: goal.",
    "CliffWalking": "x: you, o: ground, C: cliff, T: target.",
    "Taxi": "[ ]: your taxi, (X): where the passenger waits, {X}: where the passenger wants to go.",
}

_BACKGROUND = re.compile(r"\x1b\[4\d(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
_BRIGHT = re.compile(r"\x1b\[34;1m(.*?)\x1b\[0m", re.DOTALL)
_COLOURED = re.compile(r"\x1b\[3\d(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class UnknownAction(ValueError):
    """Raised when what the policy said is none of the actions; the message lists them."""


def get_short_name(environment: gymnasium.Env[object, object]) -> str:
    """``FrozenLake`` for FrozenLake-v1, in any namespace."""
    name = environment.spec.id if environment.spec is not None else type(environment.unwrapped).__name__
    return name.rpartition("/")[2].partition("-v")[0]


def list_action_names(environment: gymnasium.Env[object, Any], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a discrete environment's actions, in order; none for other spaces. Raises `ValueError` on a wrong count."""
    space = environment.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        return ()
    enumeration = getattr(environment.unwrapped, "actions", None)
    meanings = getattr(environment.unwrapped, "get_action_meanings", None)
    names: tuple[str, ...] = tuple(map(str, given)) or ACTION_NAMES.get(get_short_name(environment), ())
    if not names and isinstance(enumeration, type):
        names = tuple(str(getattr(member, "name", member)) for member in enumeration)  # type: ignore[attr-defined]
    if not names and callable(meanings):
        names = tuple(map(str, meanings()))
    names = names or tuple(str(space.start + number) for number in range(int(space.n)))
    if len(names) != space.n:
        raise ValueError(f"{len(names)} names were given for {space.n} actions")
    return names


def parse_action(text: str, environment: gymnasium.Env[object, object], names: Sequence[str]) -> object:
    """Parse ``text`` as an action of the environment's action space. Raises `UnknownAction`."""
    space = environment.action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        wanted = text.strip().strip(".").casefold()
        for number, name in enumerate(names):
            if wanted in (name.casefold(), str(space.start + number)):
                return int(space.start) + number
        raise UnknownAction(f"Unknown action {text[:80]!r}. The actions are: {', '.join(names)}.")
    words = text if is_of_text(space) and space.contains(text) else None
    try:
        action = _build_action(space, json.loads(text))
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        if words is not None:
            return words
        raise UnknownAction(f"Unknown action {text[:80]!r}: it must be JSON for {space}.") from error
    if space.contains(action):
        return action
    if words is not None:
        return words
    raise UnknownAction(f"The action {text[:80]!r} is not in {space}.")


def is_of_text(space: gymnasium.Space[Any]) -> bool:
    """True if the actions of a space are texts: Gymnasium's own such space, or a class of a package that holds any text."""
    if type(space).__module__.startswith("gymnasium."):
        return isinstance(space, gymnasium.spaces.Text)
    try:
        return space.dtype is None and space.shape is None and bool(space.contains("text"))
    except Exception:  # noqa: BLE001 - a package's space may expect its own actions alone
        return False


def _build_action(space: gymnasium.Space[Any], value: Any) -> object:
    """JSON as a space holds it: arrays in the types of their spaces, at any depth. Raises `ValueError`, `TypeError`."""
    match space, value:
        case (gymnasium.spaces.Text(), _) | (gymnasium.spaces.Discrete(), int()):
            return value
        case _, str() if is_of_text(space):
            return value
        case gymnasium.spaces.Dict(), {}:
            return {name: _build_action(space[name], inner) if name in space.spaces else inner for name, inner in value.items()}
        case gymnasium.spaces.Tuple(), [*_] if len(value) == len(space.spaces):
            return tuple(map(_build_action, space.spaces, value))
        case gymnasium.spaces.OneOf(), [int() as index, inner] if 0 <= index < len(space.spaces):
            return index, _build_action(space.spaces[index], inner)
        case gymnasium.spaces.Sequence(stack=True), [*_]:
            return np.asarray(value, dtype=space.feature_space.dtype)
        case gymnasium.spaces.Sequence(stack=False), [*_]:
            return tuple(_build_action(space.feature_space, inner) for inner in value)
    return np.asarray(value, dtype=space.dtype)


def format_observation(environment: gymnasium.Env[object, object], observation: object) -> str:
    """The observation as text: its picture in letters if there is one, else its values."""
    if environment.render_mode == "ansi":
        return strip_ansi_codes(str(environment.render()))
    grid = getattr(environment.unwrapped, "pprint_grid", None)
    if isinstance(observation, Mapping) and "mission" in observation and callable(grid):
        return f"Mission: {observation['mission']}\n{grid()}"
    return json.dumps(observation, default=_plain_value)


def strip_ansi_codes(picture: str) -> str:
    """A coloured text without its colours: a background becomes brackets, bright text parentheses, other colours braces."""
    picture = _BACKGROUND.sub(r"[\1]", picture)
    picture = _BRIGHT.sub(r"(\1)", picture)
    picture = _COLOURED.sub(r"{\1}", picture)
    return _ESCAPE.sub("", picture).strip("\n")


def _plain_value(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value)
