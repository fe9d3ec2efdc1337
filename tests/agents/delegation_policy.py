"""A policy that looks at a picture and asks a sub-agent of the agent's own: what it says at the end is what that said."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

from PIL import Image

from fleetbus_schemas import Task
from tests.agents.repair_policy import FOLDER, run
from tests.agents.tried.policy import SHELLS, PlayingSampler, Said, Tools, fill, find_tool, write

PICTURE = "picture.png"
PROMPT = f"Look at {PICTURE}, have a sub-agent look, too, and say what it said."
ASKED = "Tell me the word of the day."
SEEN = "The word is heliotrope."
UNSEEN = "Nobody told me."
VERIFIER = "def verify(final_answer):\n    return float('heliotrope' in (final_answer or ''))\n"
AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')


def build_task() -> Task:
    drawn = BytesIO()
    Image.new("RGB", (64, 64), "blue").save(drawn, "PNG")
    files = {PICTURE: base64.b64encode(drawn.getvalue()).decode()}
    return Task(key="delegate", prompt=PROMPT, config={"files": files}, verifier=VERIFIER)


def delegate(said: Said, tools: Tools) -> str:
    """The next of: find the folder, read the picture, start a sub-agent, wait for it where one has to, say what it said."""
    told = "\n".join(each["content"] for each in said if each["role"] == "user")
    shell = find_tool(tools, SHELLS)
    if PROMPT not in told:
        finish = find_tool(tools, ("complete_task",))
        if ASKED not in told:
            return "Looking at a picture"  # a title is asked for
        return SEEN if finish is None else write(fill(finish, result={"response": SEEN}))
    results = [each["content"] for each in said if each["role"] == "tool"]
    if shell is None:
        return UNSEEN
    if not results:
        return run(shell, "pwd")
    if len(results) == 1:
        return read_picture(tools, results[0])
    if len(results) == 2:
        return start_sub_agent(tools)
    if (found := AGENT_ID.search(results[2])) and (waits := find_tool(tools, ("wait_agent",))) and len(results) == 3:
        return write(fill(waits, targets=[found[1]]), before="I wait.")
    return SEEN if SEEN in "\n".join([told, *results[2:]]) else UNSEEN


def read_picture(tools: Tools, first_result: str) -> str:
    folder = FOLDER.search(first_result)
    path = f"{folder[0] if folder else '.'}/{PICTURE}"
    reader = find_first(tools, "view_image", "Read", "read_file")
    name = next(name for name in ("file_path", "path") if name in reader["parameters"]["properties"])
    return write(fill(reader, **{name: path}), before="I look.")


def find_first(tools: Tools, *names: str) -> dict[str, Any]:
    """The tool of the first name that there is."""
    return next(tool for name in names if (tool := find_tool(tools, (name,))) is not None)


def start_sub_agent(tools: Tools) -> str:
    starts = find_first(tools, "spawn_agent", "invoke_agent", "Agent")
    properties = starts["parameters"]["properties"]
    given = {"prompt": ASKED, "message": ASKED, "description": "Ask for a word"}
    given |= {"subagent_type": "general-purpose", "agent_name": "generalist"}
    return write(fill(starts, **{name: value for name, value in given.items() if name in properties}), before="I ask.")


class DelegatingSampler(PlayingSampler):
    """`Sampler` that does so."""

    def __init__(self) -> None:
        super().__init__(delegate, 0.0)
