"""A policy that repairs a repository of `repairs` through an agent's own tools: its shell, what reads a file, what edits one.

What it does next is read from the conversation alone. ``right`` and ``wrong`` name the edit that it makes.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from tests.agents.repairs import REPAIRS, TEST, Repair
from tests.agents.tried.policy import SHELLS, PlayingSampler, Said, Tools, fill, find_tool, write

Edit = Literal["right", "wrong"]
NAMED = re.compile(r"Repository: ([a-z-]+)\.")
FOLDER = re.compile(r"/\S*/episode-\w+")
COMMANDS = ("command", "cmd")
REPAIRED = "It is repaired."


def repair(said: Said, tools: Tools, edit: Edit) -> str:
    """The next of: run the tests, read the file, edit it, run the tests, say so."""
    told = "\n".join(each["content"] for each in said)
    named, shell = NAMED.search(told), find_tool(tools, SHELLS)
    if named is None or shell is None:
        return "Repairing a repository"  # a title is asked for
    fault = next(each for each in REPAIRS if each.name == named[1])
    results = [each["content"] for each in said if each["role"] == "tool"]
    done = len(results)
    if done == 0:
        return run(shell, f"pwd; head -1 /proc/self/status; python {TEST}")
    folder = FOLDER.search(results[0])
    path = f"{folder[0] if folder else '.'}/{fault.file}"
    if done == 1:
        return read_file(tools, shell, path)
    if done == 2:
        return edit_file(tools, shell, path, fault, getattr(fault, edit))
    return run(shell, f"python {TEST}") if done == 3 else REPAIRED


def run(shell: dict[str, Any], command: str) -> str:
    properties = shell["parameters"]["properties"]
    return write(fill(shell, **{next(name for name in COMMANDS if name in properties): command}), before="I run it.")


def read_file(tools: Tools, shell: dict[str, Any], path: str) -> str:
    reader = find_tool(tools, ("Read", "read_file"))
    if reader is None:
        return run(shell, f"cat {path}")
    return write(fill(reader, file_path=path), before="I read it.")


def edit_file(tools: Tools, shell: dict[str, Any], path: str, fault: Repair, new: str) -> str:
    """With a patch where there is no tool that replaces a text."""
    editor = find_tool(tools, ("Edit", "replace"))
    if editor is not None:
        return write(fill(editor, file_path=path, old_string=fault.old, new_string=new), before="I edit it.")
    lines = [f"-{line}" for line in fault.old.splitlines()] + [f"+{line}" for line in new.splitlines()]
    patch = "\n".join(["*** Begin Patch", f"*** Update File: {fault.file}", "@@", *lines, "*** End Patch"])
    patcher = find_tool(tools, ("apply_patch",))
    if patcher is not None:
        return write(fill(patcher, input=patch), before="I edit it.")
    return run(shell, f"apply_patch <<'PATCH'\n{patch}\nPATCH")


class RepairingSampler(PlayingSampler):
    """`Sampler` that repairs with one kind of edit."""

    def __init__(self, edit: Edit) -> None:
        super().__init__(lambda said, tools: repair(said, tools, edit), 0.0)
