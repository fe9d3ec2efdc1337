"""Sums, differences and products of two to four digits."""

import operator
import random

COUNT = 1200
VERIFIER = "def verify(env, final_answer=None):\n    return float(str(final_answer).strip() == '{answer}')\n"
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("calculator")
    questions = {(draw.randint(10, 9999), draw.choice("+-*"), draw.randint(10, 999)) for _ in range(COUNT)}
    return [_build_task(*question) for question in sorted(questions)]


def _build_task(left: int, sign: str, right: int) -> dict[str, object]:
    answer = OPERATIONS[sign](left, right)
    return {
        "key": f"{left}{sign}{right}",
        "prompt": f"What is {left} {sign} {right}?",
        "env_key": "calculator",
        "verifier_code": VERIFIER.format(answer=answer),
        "config": {"answer": answer},
    }
