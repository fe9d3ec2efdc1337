"""Three numbers of one digit, and a target that some expression of them has."""

import random

COUNT = 1000


def build_tasks() -> list[dict[str, object]]:
    draw = random.Random("countdown")
    tasks: dict[str, dict[str, object]] = {}
    while len(tasks) < COUNT:
        numbers = [draw.randint(1, 9) for _ in range(3)]
        first, second, third = draw.sample(numbers, 3)
        solution = f"{first} {draw.choice('+-*')} {second} {draw.choice('+-*')} {third}"
        target = eval(solution)  # of our own numbers
        shown = ", ".join(map(str, numbers))
        tasks[f"{shown}={target}"] = {
            "key": f"{shown}={target}".replace(", ", "-"),
            "prompt": f"Make {target} from {shown}.",
            "env_key": "countdown",
            "config": {"target": target, "numbers": numbers, "oracle": solution},
        }
    return list(tasks.values())
