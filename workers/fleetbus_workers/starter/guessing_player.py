"""A player that knows no environment: it takes names, numbers and formats from what it is shown, mostly the wrong ones. Pure.

What it plays in an environment of somebody's own is what a small policy imitates before it is trained there: calls that the
tools accept and answers in the form that is asked for. It never learns what is right.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from fleetbus.core.text.prompts import TOOL_RESULT
from fleetbus_schemas import ChatMessage, ToolSpec
from fleetbus_workers.environment.check.policies import Policy, read_text
from fleetbus_workers.environment.check.schema_values import choose_arguments, fill_schema
from fleetbus_workers.starter.conversation import DONE

MOST_IN_RANGE = 1000
LARGEST_GUESS = 20

OFFERED_SHARE = 0.8
"""Of the answers where the actions are listed: random words reach no goal that takes six right moves of twelve."""

_QUOTED = re.compile(r'"([^"\n]{1,60})"|`([^`\n]{1,60})`|(?<!\w)\'([^\'\n]{1,60})\'(?!\w)')
_NUMBER = re.compile(r"-?\d{1,18}")
_WORD = re.compile(r"[^\W\d_][\w-]*")
_RANGE = re.compile(r"(-?\d{1,18})\s*(?:and|to|through|\.\.|-)\s*(-?\d{1,18})")
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\]")
_LISTED = re.compile(r"[:(]\s*([^\n:().?]+(?:(?:,| or )\s*[^\n:().?,]+)+)")
_OFFERED = re.compile(r"\b(?:answer|reply|choose|actions?|moves?|options?)\b[^\n:.]{0,40}:\s*([^\n:.]+)", re.IGNORECASE)
_SEPARATOR = re.compile(r",| or ")
_TAG = re.compile(r"<(answer|action|move|guess)>")


def build_guessing_player(seed: int) -> Policy:
    """The player with the random numbers of a seed."""
    draw = random.Random(seed)

    def act(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> str:
        shown = [read_text(message) for message in messages if message.role != "assistant"]
        asked = read_text(next((message for message in messages if message.role == "user"), messages[0]))
        end = f" {DONE}" if any(DONE in text for text in shown) else ""
        return _use_tools(draw, asked, shown[-1], tools, end) if tools else _answer(draw, asked, shown)

    return act


def _use_tools(draw: random.Random, asked: str, last: str, tools: Sequence[ToolSpec], end: str) -> str:
    """A call of a tool; after a result, half of the time one of its values as the answer, with the ``end`` that is asked
    for."""
    found = list(_find_values(last)) if last != asked and not last.startswith("Error") else []
    if found and draw.random() < 0.5:
        return f"{draw.choice(found)}{end}"
    tool = draw.choice(list(tools))
    chosen = choose_arguments(tool.parameters, draw)
    arguments = {name: _choose_argument(draw, schema, tool.parameters, asked, found) for name, schema in chosen.items()}
    return f"<tool_call>{json.dumps({'name': tool.name, 'arguments': arguments})}</tool_call>"


def _choose_argument(draw: random.Random, schema: object, root: object, asked: str, found: Sequence[str]) -> object:
    kind = schema.get("type") if isinstance(schema, Mapping) and not schema.get("enum") else None
    if kind in ("integer", "number"):
        numbers = [text for text in found if _NUMBER.fullmatch(text)] or _NUMBER.findall(asked)
        return int(draw.choice(numbers)) if numbers else fill_schema(schema, draw, root)
    if kind == "string":
        texts = _find_quoted(asked) or _WORD.findall(asked)
        texts += [text for text in found if not _NUMBER.fullmatch(text)]
        return draw.choice(texts) if texts else fill_schema(schema, draw, root)
    return fill_schema(schema, draw, root)


def _find_values(result: str) -> Iterator[str]:
    """Numbers and texts of a tool's result: the leaves of its JSON, else its words."""
    text = result.removeprefix(TOOL_RESULT)
    try:
        yield from _list_leaves(json.loads(text))
    except ValueError:
        yield from _NUMBER.findall(text) or _WORD.findall(text)


def _list_leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _list_leaves(inner)
    elif value is not None:
        yield str(value)


def _answer(draw: random.Random, asked: str, shown: Sequence[str]) -> str:
    """Something that may be said here, in the form that the first message asks for."""
    offered = [option for listed in _OFFERED.findall(asked) for option in _split_options(listed)]
    if len(offered) > 1 and draw.random() < OFFERED_SHARE:  # what is offered is said as it stands there
        return _write(draw.choice(offered), "\n".join(shown[:2]), brackets=False)
    pools = [pool for pool in _list_pools(draw, asked, shown[-1]) if pool]
    return _write(draw.choice(draw.choice(pools)), "\n".join(shown[:2]))


def _split_options(listed: str) -> list[str]:
    return [option.strip() for option in _SEPARATOR.split(listed) if option.strip()]


def _list_pools(draw: random.Random, asked: str, last: str) -> Iterator[list[str]]:
    limits = [(int(low), int(high)) for low, high in _RANGE.findall(asked)]
    inside = [str(draw.randint(low, high)) for low, high in limits if 0 <= high - low <= MOST_IN_RANGE]
    yield inside
    yield inside
    yield _find_quoted(asked) + _BRACKETED.findall(asked)
    yield [option for listed in _LISTED.findall(asked) for option in _split_options(listed)]
    yield _WORD.findall(last)
    yield _NUMBER.findall(last)
    yield [str(draw.randint(0, LARGEST_GUESS))]


def _write(text: str, asked: str, *, brackets: bool = True) -> str:
    if tag := _TAG.search(asked):
        return f"<{tag[1]}>{text}</{tag[1]}>"
    if "\\boxed" in asked:
        return f"\\boxed{{{text}}}"
    if brackets and (_BRACKETED.search(asked) or "bracket" in asked):
        return f"[{text}]"
    return f"{text} {DONE}" if DONE in asked else text


def _find_quoted(text: str) -> list[str]:
    return ["".join(groups) for groups in _QUOTED.findall(text)]
