"""An environment of v0, as a team has it: the reward is the share of vowels in the answer."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def vowels(completion: list, **kwargs: object) -> float:
    said = str(completion[-1]["content"] or "")
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))


def load_environment() -> vf.Environment:
    rows = [{"question": f"Say a word of {count} letters.", "answer": ""} for count in range(3, 11)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[vowels]))
