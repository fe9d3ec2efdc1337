"""The same as a taskset of v1."""

from __future__ import annotations

import verifiers.v1 as vf


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        said = trace.last_reply or ""
        return sum(letter in "aeiou" for letter in said) / max(1, len(said))


class LettersTaskset(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self) -> list[LettersTask]:
        prompts = [f"Say a word of {count} letters." for count in range(3, 11)]
        return [LettersTask(vf.TaskData(idx=index, prompt=prompt), self.config.task) for index, prompt in enumerate(prompts)]


__all__ = ["LettersTaskset"]
