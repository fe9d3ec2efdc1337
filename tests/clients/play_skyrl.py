"""SkyRL's environments under faults, for a Python with `skyrl-gym` and fleetbus: ``play_skyrl.py FACTS``; see `test_kills.py`.

Episodes run in threads, as in SkyRL's generators.
"""

from __future__ import annotations

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import skyrl_gym


def play(facts: dict[str, Any]) -> dict[str, Any]:
    config = {"nats_url": facts["url"], "run": facts["run"], "tasks_file": facts["tasks"]}
    environment = skyrl_gym.make("fleetbus", env_config=config, extras={"task_key": "t"})
    environment.init([])
    session = environment._session.name
    told = []
    for number in range(1, facts["steps"] + 1):
        output = environment.step(f"step {number}")
        assert "error" not in output["metadata"], output
        told.append([output["observations"][0]["content"], output["reward"], output["done"]])
    environment.close()
    return {"session": session, "told": told, "count": environment.get_metrics()["turns"]}


def main(facts: dict[str, Any]) -> None:
    skyrl_gym.register(id="fleetbus", entry_point="fleetbus.client.skyrl:FleetbusEnv")
    numbers = itertools.count()

    def play_on(_: int) -> None:
        while next(numbers) < facts["episodes"] or not Path(facts["enough"]).exists():
            sys.stdout.write(json.dumps(play(facts)) + "\n")  # in one piece: print writes the end of the line on its own
            sys.stdout.flush()

    with ThreadPoolExecutor(facts["parallel"]) as threads:
        list(threads.map(play_on, range(facts["parallel"])))


main(json.loads(sys.argv[1]))
