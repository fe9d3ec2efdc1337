"""Finds out how a chat template writes tools, by rendering three turns with calls and results, and proves it.

Above it is `ChatTemplate`, below it the template's own rendering. What a template writes for two calls is parsed by every
format of `fleetbus.core.text.tool_formats` until one gives the calls back; and turn by turn what is appended has to be what the
template writes of the whole. A template that fails either is refused in one line.
"""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from fleetbus.core.text.reasoning import REASONING_MARKS
from fleetbus.core.text.tool_formats import TOOL_FORMATS, ToolFormat, build_call_id, parse_response, read_call_number
from fleetbus.errors import UserError
from fleetbus_schemas import ToolCall, ToolSpec

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, Sequence[dict[str, Any]] | None], str]
"""Messages and tools to text, ready for the assistant's next turn; raises `UserError` if the template refuses."""

_MARK = "Fleetbusargument"
_QUESTION = {"role": "user", "content": "Fleetbusquestion"}
_TOOL = ToolSpec(
    name="fleetbus_tool",
    description="Fleetbusdescription",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string", "description": "a text"}, "count": {"type": "integer"}},
        "required": ["text"],
    },
)


class ToolSupport(msgspec.Struct, frozen=True, kw_only=True):
    """A template's support of tools. ``call_end`` is the token that ends a turn with calls; ``parallel``: several calls in
    one response; ``counts_calls``: what it writes for results depends on how many calls there were before;
    ``arguments_as_text``: it takes arguments as JSON text; ``proof`` is the conversation that
    was rendered."""

    format: ToolFormat
    call_end: str
    parallel: bool = True
    counts_calls: bool = False
    arguments_as_text: bool = False
    proof: str = ""


def build_tool_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def find_reasoning_marks(template: str) -> tuple[str, str] | None:
    """The marks around reasoning that a template's text has, if it has any."""
    return next((marks for marks in REASONING_MARKS if marks[1] in template), None)


def render_results(render: Render, support: ToolSupport, results: Messages, following: Messages = ()) -> str:
    """Render what the template writes after a turn with calls when their ``results`` and then other messages follow, from the
    end of that turn on. Where the template counts calls, the first result's id says how many came before."""
    before = read_call_number(results[0]["tool_call_id"]) if support.counts_calls else 0
    past = [build_call_id(number) for number in range(before)]
    history = []
    for call_id in past:
        history += [_build_assistant_turn([_build_call(_MARK, call_id)], support), _build_result(call_id, "")]
    calls = [_build_call(_MARK, result["tool_call_id"], name=result.get("name") or _TOOL.name) for result in results]
    rendered = render([_QUESTION, *history, _build_assistant_turn(calls, support), *results, *following], None)
    place = 0
    for _ in (*past, *calls):  # what results say comes after all of these
        place = rendered.index(_MARK, place) + len(_MARK)
    return rendered[rendered.index(support.call_end, place) :]


def prove_tools(render: Render, *, turn_end: str, ends: Collection[str], special: Collection[str]) -> ToolSupport:
    """Prove the template's support of tools. ``turn_end`` ends an assistant's turn, ``ends`` are all tokens that the folder
    declares as ends, ``special`` all that begin or end something. Raises `UserError` that says what it cannot do."""
    tools = [build_tool_schema(_TOOL)]
    opening = render([_QUESTION], tools)
    if _TOOL.name not in opening or _TOOL.description not in opening:
        raise UserError("the chat template shows no tools to the model")
    problem = ""
    for arguments_as_text, parallel in ((False, True), (False, False), (True, True), (True, False)):
        guess = ToolSupport(format=TOOL_FORMATS[0], call_end=turn_end, parallel=parallel, arguments_as_text=arguments_as_text)
        try:
            return _prove(render, guess, opening, tools, ends=[turn_end, *ends], special=special)
        except (UserError, ValueError) as error:
            problem = problem or str(error)
    raise UserError(problem)


class _Turn(NamedTuple):
    """A turn of the conversation that is proved."""

    calls: list[ToolCall]
    results: list[dict[str, Any]]


def _prove(
    render: Render,
    guess: ToolSupport,
    opening: str,
    tools: list[dict[str, Any]],
    *,
    ends: Sequence[str],
    special: Collection[str],
) -> ToolSupport:
    turns, conversation, number = [], [_QUESTION], 0
    for _ in range(2):
        calls = [_build_call(f"{_MARK}{each}", build_call_id(each)) for each in range(number, number + 1 + guess.parallel)]
        results = [_build_result(call.id, f"Fleetbusresult{call.id}") for call in calls]
        turns.append(_Turn(calls, results))
        conversation += [_build_assistant_turn(calls, guess), *results]
        number += len(calls)
    whole = render(conversation, tools)
    for turn in turns:
        if any(call.arguments["text"] not in whole for call in turn.calls):
            raise UserError("the chat template does not write the tool calls of earlier turns")
        if any(result["content"] not in whole for result in turn.results):
            raise UserError("the chat template does not show the results of tools (role tool)")
    guess = msgspec.structs.replace(guess, call_end=_find_call_end(whole, turns[0], ends, special))
    guess = msgspec.structs.replace(guess, counts_calls=_detect_counting(render, guess, turns[1]))
    position, written = _skip(whole, 0, opening), []
    for turn in turns:
        following = render_results(render, guess, turn.results)
        stop = whole.find(guess.call_end, whole.index(turn.calls[-1].arguments["text"], position))
        written.append(whole[position:stop])
        position = _skip(whole, stop, following)
    if position != len(whole):
        raise UserError("the chat template rewrites earlier turns with tool calls when later ones are added")
    found = _find_format(written, turns)
    return msgspec.structs.replace(guess, format=found, proof=whole)


def _skip(whole: str, at: int, piece: str) -> int:
    """The end of ``piece``, which stands at a place of ``whole``; a thought that is opened only for a turn to come may lack.
    Raises `UserError` if something else is there."""
    if whole.startswith(piece, at):
        return at + len(piece)
    for opening, closing in REASONING_MARKS:
        head, opened, thought = piece.rpartition(opening)
        if opened and not thought.replace(closing, "").strip() and whole.startswith(head, at):
            return at + len(head)
    raise UserError("the chat template rewrites earlier turns with tool calls when later ones are added")


def _find_call_end(whole: str, turn: _Turn, ends: Sequence[str], special: Collection[str]) -> str:
    """The token that ends a turn with calls: one that the folder declares as an end, else the first special one between."""
    begin = whole.index(turn.calls[-1].arguments["text"])
    between = whole[begin : whole.index(turn.results[0]["content"], begin)]
    for candidates in (ends[:1], ends, special):
        places = [(between.index(token), -len(token), token) for token in candidates if token in between]
        if places:
            return min(places)[2]
    raise UserError("the chat template ends a turn with tool calls with no token of the vocabulary")


def _detect_counting(render: Render, support: ToolSupport, turn: _Turn) -> bool:
    counting = msgspec.structs.replace(support, counts_calls=True)
    return render_results(render, counting, turn.results) != render_results(render, support, turn.results)


def _find_format(written: Sequence[str], turns: Sequence[_Turn]) -> ToolFormat:
    for tool_format in TOOL_FORMATS:
        if all(_reads(tool_format, text, turn.calls) for text, turn in zip(written, turns, strict=True)):
            return tool_format
    names = ", ".join(tool_format.name for tool_format in TOOL_FORMATS)
    raise UserError(f"the chat template writes tool calls in none of the known formats ({names})")


def _reads(tool_format: ToolFormat, text: str, calls: Sequence[ToolCall]) -> bool:
    parsed = parse_response(_remove_thought(text), tool_format, (_TOOL,))
    return not parsed.errors and [(call.name, call.arguments) for call in parsed.calls] == [
        (call.name, call.arguments) for call in calls
    ]


def _remove_thought(text: str) -> str:
    for _, closing in REASONING_MARKS:
        text = text.rpartition(closing)[2]
    return text


def _build_call(text: str, call_id: str, *, name: str = _TOOL.name) -> ToolCall:
    return ToolCall(name=name, arguments={"text": text, "count": 7}, id=call_id)


def _build_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": _TOOL.name}


def _build_assistant_turn(calls: Sequence[ToolCall], support: ToolSupport) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [build_call_entry(call, as_text=support.arguments_as_text) for call in calls],
    }


def build_call_entry(call: ToolCall, *, as_text: bool = False) -> dict[str, object]:
    """A call as chat templates take it."""
    arguments: object = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
