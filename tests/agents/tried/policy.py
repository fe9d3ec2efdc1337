"""A policy for agents as they are shipped: it calls whichever tool an agent offers, and then answers. Its template too.

What it says is read from the conversation alone, so that an inference worker that takes over says the same. A conversation is
rendered as one line of JSON per message, cut where it is long: agents' prompts have a hundred thousand bytes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from fleetbus_schemas import ChatMessage, ToolSpec, VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.canned import STOP, CannedTemplate
from fleetbus_workers.inference.scripted import StubSampler

LINE = 257
"""Begins a message, or the tools that are offered."""

SHOWN_CHARS = 4000
DEFERRED = re.compile(r"mcp__\w+__peek")
"""The name of a tool that is told in a text and has to be searched for first, as Claude Code does it."""

ANSWER = "The sum is 60."
MARK = "sample-"
SHELLS = ("bash", "shell", "exec_command", "run_shell_command", "execute_command", "run_commands", "terminal", "execute_bash")
COMMANDS = ("command", "cmd", "commands", "script")
FINISHES = ("attempt_completion", "final_answer", "finish", "submit", "submit_and_exit")
WORDS: dict[str, Any] = {"string": "it", "boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}

Said = list[dict[str, Any]]
Tools = list[dict[str, Any]]


class ShownTemplate(CannedTemplate):
    """One id per byte of what `Conversation.read` understands."""

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        offered = [{"name": tool.name, "parameters": shorten(tool.parameters)} for tool in tools]
        return [*encode_line({"tools": offered}), *self.encode_continuation((), messages)]

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        return [each for message in messages for each in encode_line(describe(message))]


def describe(message: ChatMessage) -> dict[str, object]:
    shown: dict[str, object] = {"role": message.role, "content": show(message.content)}
    return shown | {"calls": [each.name for each in message.tool_calls]} if message.tool_calls else shown


def shorten(schema: Any) -> dict[str, Any]:
    """The fields that a call has to fill."""
    known = schema if isinstance(schema, dict) else {}
    properties = {name: each.get("type", "") for name, each in known.get("properties", {}).items() if isinstance(each, dict)}
    return {"properties": properties, "required": known.get("required", [])}


def show(content: object) -> str:
    text = content if isinstance(content, str) else str(content)
    if len(text) <= SHOWN_CHARS:
        return text
    return "\n".join([text[: SHOWN_CHARS // 2], text[-SHOWN_CHARS // 2 :], *DEFERRED.findall(text)])


def encode_line(shown: object) -> list[int]:
    return [LINE, *json.dumps(shown).encode(), *b"\n"]


def read_history(ids: Sequence[int]) -> tuple[Said, Tools]:
    """The messages that the ids show, the policy's own as `assistant`, and the tools that are offered."""
    chunks: list[list[int]] = []
    for each in ids:
        if each == LINE:
            chunks.append([])
        elif each != STOP:
            chunks[-1].append(each)
    said: Said = []
    tools: Tools = []
    for chunk in chunks:
        line, _, own = bytes(chunk).partition(b"\n")
        shown = json.loads(line)
        if "tools" in shown:
            tools = shown["tools"]
        else:
            said.append(shown)
        if own:
            said.append({"role": "assistant", "content": own.decode("utf-8", "replace")})
    return said, tools


def find_tool(tools: Tools, names: Sequence[str]) -> dict[str, Any] | None:
    """The first tool of one of these names, whatever stands before it, as a server's name does."""
    ends = re.compile(rf"(^|[._/-])({'|'.join(names)})$", re.IGNORECASE)
    return next((tool for tool in tools if ends.search(tool["name"])), None)


def fill(tool: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Arguments: what is given, and a word for all else that is required."""
    properties = tool["parameters"]["properties"]
    required = {name: WORDS.get(properties.get(name, ""), "it") for name in tool["parameters"]["required"]}
    return {"name": tool["name"], "arguments": required | given}


def call(tool: dict[str, Any], at: int) -> dict[str, Any]:
    """A look at a place: by the agent's tool, or by a command that says the same."""
    properties = tool["parameters"]["properties"]
    name = next((each for each in COMMANDS if each in properties), None)
    if name is None or "at" in properties:
        return fill(tool, at=at)
    command = f"echo look-$((10*{at}))"
    return fill(tool, **{name: [command] if properties[name] == "array" else command})


def write(*calls: dict[str, Any], before: str = "I look.") -> str:
    return "\n".join([before, *(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in calls)])


def use_tools(said: Said, tools: Tools) -> str:
    """Two looks side by side, one more by the server of the Model Context Protocol where there is one, and the answer."""
    own, served = find_tool(tools, ["look"]) or find_tool(tools, SHELLS), find_tool(tools, ["peek"])
    first, second = own or served, served or own
    if first is None or second is None:
        return "Looking at places"
    results = sum(each["role"] == "tool" for each in said)
    searched = sum(each["role"] == "assistant" and "ToolSearch" in f"{each}" for each in said)
    search, deferred = find_tool(tools, ["ToolSearch"]), {name for each in said for name in DEFERRED.findall(each["content"])}
    if results == 2 and find_tool(tools, ["peek"]) is None and search is not None and deferred and not searched:
        return write(fill(search, query=f"select:{min(deferred)}"))
    results -= searched
    if results == 0:
        return write(call(first, 1), call(first, 2))
    if results == 1:
        return write(call(first, 2))
    if results == 2:
        return write(call(second, 3))
    if (finish := find_tool(tools, FINISHES)) is not None:
        texts = [name for name, kind in finish["parameters"]["properties"].items() if kind in ("string", "")]
        return write(fill(finish, **{texts[0]: ANSWER}), before="I know it.")
    return ANSWER


def write_nous(said: Said, tools: Tools) -> str:
    """The same for an agent that reads calls from the text, and tells results in the user's words."""
    results = sum(each["content"].count("<tool_response>") for each in said if each["role"] == "user")
    looks = {0: (1, 2), 1: (2,), 2: (3,)}.get(results)
    if looks is None:
        return ANSWER
    name = "peek" if results == 2 and any("peek" in each["content"] for each in said) else "look"
    return write(*({"name": name, "arguments": {"at": at}} for at in looks))


def write_code(said: Said, tools: Tools) -> str:
    """For an agent that runs code: between tags, as `CodeAgent` of smolagents reads it."""
    turn = sum(each["role"] == "assistant" for each in said)
    steps = ("print(look(at=1), look(at=2))", "print(look(at=3))", f'final_answer("{ANSWER}")')
    return f"Thought: I look.\n<code>\n{steps[min(turn, 2)]}\n</code>"


def write_edits(said: Said, tools: Tools) -> str:
    """For an agent that edits files by blocks of text, as aider does: a new file, and a second line when its test failed."""
    turn = sum(each["role"] == "assistant" and "REPLACE" in each["content"] for each in said)
    before, after = (("", "look-60\n"), ("look-60\n", "look-60\nright\n"))[min(turn, 1)]
    return f"{ANSWER}\n\nmade.txt\n```\n<<<<<<< SEARCH\n{before}=======\n{after}>>>>>>> REPLACE\n```\n"


def write_fields(said: Said, tools: Tools) -> str:
    """For an agent whose answers are fields of a text, as DSPy reads them: a thought, a tool and its arguments."""
    asked, told = said[0]["content"], said[-1]["content"]
    if "next_tool_name" not in asked:
        fields = {"reasoning": "They were looked at.", "answer": ANSWER}
    else:
        step = next((step for step in range(9) if f"observation_{step}" not in told), 9)
        name, given = ("look", {"at": step + 1}) if step < 3 else ("finish", {})
        fields = {"next_thought": "I look.", "next_tool_name": name, "next_tool_args": json.dumps(given)}
    written = [f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()]
    return "\n\n".join([*written, "[[ ## completed ## ]]"])


def write_marked(said: Said, tools: Tools) -> str:
    """`use_tools`, with another word each time: it tells whose sample an agent got."""
    return f"{MARK}{secrets.token_hex(8)} {use_tools(said, tools)}"


POLICIES: dict[str, Callable[[Said, Tools], str]] = {
    "tools": use_tools,
    "nous": write_nous,
    "code": write_code,
    "edits": write_edits,
    "fields": write_fields,
    "marked": write_marked,
}


class PlayingSampler(StubSampler):
    """`Sampler` that says what a policy says, one of `POLICIES` by its name, after so many seconds; a long text is cut."""

    def __init__(self, policy: str | Callable[[Said, Tools], str], seconds: float) -> None:
        self._decide, self._seconds = POLICIES[policy] if isinstance(policy, str) else policy, seconds

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.sleep(self._seconds)
        whole = [*self._decide(*read_history(request.ids)).encode(), STOP]
        ids = whole[: request.max_tokens]
        return Generation(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            finish_reason="stop" if len(ids) == len(whole) else "length",
            versions=(VersionSpan(version=self.version, start=0, stop=len(ids)),),
        )
