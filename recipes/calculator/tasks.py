"""Sums, differences and products of two to four digits, with one worked example before each question."""

import random

COUNT = 1200
EXAMPLE = """Example. What is 912 + 45?
<tool_call>{"name": "calculate", "arguments": {"left": 912, "sign": "+", "right": 45}}</tool_call>
957
957 <done>

"""
VERIFIER = "def verify(env, final_answer=None):\n    return float(str(final_answer).strip() == '{answer}')\n"
OPERATIONS = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("calculator")
    questions = {(draw.randint(10, 9999), draw.choice("+-*"), draw.randint(10, 999)) for _ in range(COUNT)}
    return [_build_task(*question) for question in sorted(questions)]


def _build_task(left: int, sign: str, right: int) -> dict[str, object]:
    answer = OPERATIONS[sign](left, right)
    return {
        "key": f"{left}{sign}{right}",
        "prompt": f"{EXAMPLE}What is {left} {sign} {right}?",
        "env_key": "calculator",
        "verifier_code": VERIFIER.format(answer=answer),
        "config": {"answer": answer},
    }
