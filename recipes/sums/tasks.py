"""Every pair of numbers once, in an order drawn for it: a pair that is held out was never seen either way round."""

import random

LARGEST_TERM = 40
LARGEST_FACTOR = 12


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("sums")
    pairs = [("+", one, other) for one in range(1, LARGEST_TERM + 1) for other in range(one, LARGEST_TERM + 1)]
    pairs += [("×", one, other) for one in range(2, LARGEST_FACTOR + 1) for other in range(one, LARGEST_FACTOR + 1)]
    return [_build_task(sign, *draw.sample((one, other), 2)) for sign, one, other in pairs]


def _build_task(sign: str, left: int, right: int) -> dict[str, object]:
    return {
        "key": f"{left}{sign}{right}",
        "prompt": f"What is {left} {sign} {right}?",
        "env_key": "sums",
        "config": {"answer": left + right if sign == "+" else left * right},
    }
