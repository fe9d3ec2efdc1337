"""The cases of a probe, from tasks or recorded episodes: a task, its right answer where one is known, what was said before.

A right answer is the task's ``answer`` or ``oracle`` in its config, else what the best-rewarded recorded episode answered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from fleetbus.core.probe.answers import is_same, is_value, normalize
from fleetbus.core.probe.variants import Sort
from fleetbus.core.text.tool_calls import final_answer, is_done
from fleetbus.recording.episodes import Transcript
from fleetbus_schemas import GRADED, Task
from fleetbus_workers.environment.check.policies import find_oracle
from fleetbus_workers.replay.regrading import build_conversation, find_final_answer, find_old_reward

MAX_SAMPLED = 6
"""Different answers that are kept of a task."""

_ERRORS = ("error:", "error ", "traceback (most recent", "exception:", "[tool error")


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that a policy gave, what kind it is of, and what was said before it."""

    name: str
    sort: Sort
    text: str | None
    before: tuple[str, ...] = ()
    conversation: list[dict[str, Any]] = []


class Case(msgspec.Struct, kw_only=True):
    """``before`` are the texts of the turns before the answer, ``conversation`` all messages before it; ``said`` is the text in
    which the right answer stands, if it was seen in one."""

    task: Task
    prompt: str
    answer: str | None = None
    said: str | None = None
    before: tuple[str, ...] = ()
    conversation: list[dict[str, Any]] = []
    sampled: list[Sampled] = []


def build_cases(tasks: Iterable[Task]) -> list[Case]:
    """A case for each task."""
    return [_build_case(task) for task in tasks]


def find_answer(task: Task) -> str | None:
    """The right answer that the config of a task holds."""
    answer = task.config.get("answer")
    if isinstance(answer, str) and answer.strip():
        return answer
    return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else None


def _build_case(task: Task) -> Case:
    script = tuple(find_oracle(task) or ())
    said = script[-1] if script else None
    answer = find_answer(task) or (None if said is None else _strip(said))
    shown = [{"role": "user", "content": task.prompt}]
    return Case(task=task, prompt=task.prompt, answer=answer, said=said, before=script[:-1], conversation=shown)


def _strip(said: str) -> str | None:
    return (final_answer(said) if is_done(said) else said) or None


class _Seen(msgspec.Struct, kw_only=True):
    """One recorded answer. ``text`` is the final answer, ``last`` all of the last action."""

    text: str | None
    last: str
    reward: float
    before: tuple[str, ...]
    conversation: list[dict[str, Any]]


async def collect_cases(transcripts: AsyncIterator[Transcript], *, count: int, success: float, raw: bool) -> list[Case]:
    """Cases of the first ``count`` tasks that were played, with what was sampled for them. ``raw``: what is graded is the whole
    action, as an environment takes it, and not the final answer that a verifier gets. Memory is bounded by ``count``."""
    tasks: dict[str, Task] = {}
    seen: dict[str, dict[str, _Seen]] = {}
    async for transcript in transcripts:
        result = transcript.result
        if result is None or result.outcome not in (*GRADED, "verifier_unknown") or not transcript.turns:
            continue
        key = result.task_key
        if key not in tasks and len(tasks) >= count:
            continue
        tasks.setdefault(key, transcript.request.task if transcript.request else Task(key=key))
        _keep(seen.setdefault(key, {}), _read(transcript))
    return [_build_recorded(tasks[key], list(seen[key].values()), success, raw=raw) for key in tasks]


def _read(transcript: Transcript) -> _Seen:
    assert transcript.result is not None
    texts = [turn.action.text for turn in transcript.turns if turn.action is not None]
    conversation = build_conversation(transcript)
    while conversation and conversation[-1]["role"] != "assistant":  # what an environment said last answers the answer
        conversation.pop()
    return _Seen(
        text=find_final_answer(transcript),
        last=texts[-1] if texts else "",
        reward=find_old_reward(transcript.result) or 0.0,
        before=tuple(texts[:-1]),
        conversation=conversation[:-1],
    )


def _keep(kept: dict[str, _Seen], each: _Seen) -> None:
    """One of those that say the same, and of too many different ones the best-rewarded and the first."""
    name = "" if each.text is None else normalize(each.text)[:200] + f" {len(each.text)}"
    if name in kept:
        return
    if len(kept) >= MAX_SAMPLED:
        worst = min(kept, key=lambda other: kept[other].reward)
        if kept[worst].reward >= each.reward:
            return
        del kept[worst]
    kept[name] = each


def _build_recorded(task: Task, seen: list[_Seen], success: float, *, raw: bool) -> Case:
    best = max(seen, key=lambda each: each.reward)
    given, is_success = find_answer(task), best.reward >= success and bool(best.text)
    prompt = task.prompt or next((str(each["content"]) for each in best.conversation if each["role"] == "user"), "")
    return Case(
        task=task,
        prompt=prompt,
        answer=given or (best.text if is_success else None),
        said=(best.last if raw else best.text) if is_success else None,
        before=best.before,
        conversation=best.conversation,
        sampled=[_build_sampled(each, prompt, given, raw=raw) for each in seen],
    )


def _build_sampled(seen: _Seen, prompt: str, answer: str | None, *, raw: bool) -> Sampled:
    name, sort = _name_sampled(seen.text, prompt, answer)
    text = seen.last if raw else seen.text
    return Sampled(name=f"sampled: {name}", sort=sort, text=text, before=seen.before, conversation=seen.conversation)


def _name_sampled(text: str | None, prompt: str, answer: str | None) -> tuple[str, Sort]:
    """The kind of a sampled answer: an empty one, a copy, an error, the right one in other dress, or one without it."""
    plain, shown = normalize(text or ""), normalize(prompt)
    if not plain:
        return "no answer", "lazy"
    if len(shown) >= 20 and shown in plain and len(plain) < 1.5 * len(shown):
        return "the prompt copied", "lazy"
    if plain.startswith(_ERRORS):
        return "a tool's error", "lazy"
    if answer is not None and is_value(answer):
        if is_same(text or "", answer):
            return "the right answer in other dress", "same"
        if normalize(answer) not in plain.replace(",", ""):
            return "an answer without the right one in it", "wrong"
    return "other answers", "any"
