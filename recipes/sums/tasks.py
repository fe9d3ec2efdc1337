"""Pairs of numbers, asked for in both orders: a pair that is held out was never seen either way round."""

import random

from fleetbus.core.training.splits import hash_key

LARGEST_TERM = 40
LARGEST_FACTOR = 12
HELD_OUT = 30
"""Tasks that a run holds out: those with the lowest hashes of their keys."""


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("sums")
    pairs = [("+", one, other) for one in range(1, LARGEST_TERM + 1) for other in range(one, LARGEST_TERM + 1)]
    pairs += [("×", one, other) for one in range(2, LARGEST_FACTOR + 1) for other in range(one, LARGEST_FACTOR + 1)]
    questions = [(sign, *draw.sample((one, other), 2)) for sign, one, other in pairs]
    last = sorted(_hash_question(*question) for question in questions)[HELD_OUT - 1]
    turned = [(sign, right, left) for sign, left, right in questions if left != right]
    questions += [each for each in turned if min(_hash_question(*each), _hash_question(each[0], each[2], each[1])) > last]
    return [_build_task(*question) for question in questions]


def _hash_question(sign: str, left: int, right: int) -> float:
    return hash_key(f"{left}{sign}{right}")


def _build_task(sign: str, left: int, right: int) -> dict[str, object]:
    return {
        "key": f"{left}{sign}{right}",
        "prompt": f"What is {left} {sign} {right}?",
        "env_key": "sums",
        "config": {"answer": left + right if sign == "+" else left * right},
    }
