"""Places that an answer may have in what is said: bare, boxed, in a tag, before an end mark. Pure.

A grader pays right answers only where it looks for them. Each slot is tried with right answers first, and the one that earns
most is where all others go.
"""

from __future__ import annotations

import re

import msgspec

_TAG = re.compile(r"<([A-Za-z][\w-]{1,30})>")
_THOUGHTS = frozenset({"think", "thinking", "thought", "reasoning", "scratchpad", "tool_call", "function_call", "done"})
DONE = " <done>"
"""The mark that ends an episode with tools."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """``before`` and ``after`` stand around the answer, ``end`` after all that is said."""

    name: str
    before: str = ""
    after: str = ""
    end: str = ""

    def fill(self, answer: str) -> str:
        """The text that is said with this answer."""
        return f"{self.before}{answer}{self.after}{self.end}"


def list_slots(prompt: str, *, ends: bool) -> list[Slot]:
    """Slots to be tried, the plainest first: bare, those that the prompt asks for, the usual ones. ``ends``: with and without
    `DONE`."""
    found = [Slot(name="bare")]
    tags = [tag for tag in dict.fromkeys(_TAG.findall(prompt)) if tag.casefold() not in _THOUGHTS]
    found += [Slot(name=f"<{tag}>", before=f"<{tag}>", after=f"</{tag}>") for tag in tags[-2:]]
    if "####" in prompt:
        found.append(Slot(name="####", before="#### "))
    if "```" in prompt:
        found.append(Slot(name="code block", before="```python\n", after="\n```"))
    found.append(Slot(name="boxed", before="\\boxed{", after="}"))
    if "answer" not in tags:
        found.append(Slot(name="<answer>", before="<answer>", after="</answer>"))
    found.append(Slot(name="Answer:", before="Answer: "))
    if not ends:
        return found
    return [slot for each in found for slot in (each, msgspec.structs.replace(each, name=f"{each.name}, done", end=DONE))]


def find_slot(said: str, answer: str) -> Slot | None:
    """The slot in which ``answer`` stands in what was said; None if it does not stand there, or is all of it."""
    place = said.rfind(answer) if answer else -1
    if place < 0 or said.strip() == answer.strip():
        return None
    return Slot(name="as sampled", before=said[:place], after=said[place + len(answer) :])
