"""Questions for the value of a name."""

import importlib.util
import random
from pathlib import Path

COUNT = 400
VERIFIER = "def verify(env, final_answer=None):\n    return float(str(final_answer).strip() == '{answer}')\n"


def build_tasks() -> list[dict[str, object]]:
    spec = importlib.util.spec_from_file_location("store_server", Path(__file__).with_name("server.py"))
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    return [_build_task(seed, server.draw_store(seed)) for seed in range(COUNT)]


def _build_task(seed: int, store: dict[str, tuple[str, int]]) -> dict[str, object]:
    name = random.Random(-1 - seed).choice(list(store))
    return {
        "key": f"store-{seed}",
        "prompt": f"What is the value of {name}?",
        "env_key": "store",
        "seed": seed,
        "verifier_code": VERIFIER.format(answer=store[name][1]),
        "config": {"answer": store[name][1]},
    }
