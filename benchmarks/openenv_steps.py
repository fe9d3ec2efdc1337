"""Steps per second through the OpenEnv adapter, beside the plain OpenEnv client, against one real server in the same run.

Needs a Python with `openenv` (`just test-openenv` makes one, or ``OPENENV_PYTHON`` names it). The two take turns, so that a
slow minute of the machine slows both; the figure is the median of the rounds' ratios. A step here is one action of a policy:
its text parsed, one frame to the server and back, the observation as the policy would read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from schemas import Action, Task
from tests.support.openenv_process import openenv_python, openenv_server
from workers.environment.openenv import OpenEnvEnvironment
from workers.environment.openenv_server import OpenEnvServer

PLAIN = Path(__file__).with_name("openenv_plain.py")


async def through_fleetbus(url: str, sessions: int, seconds: float) -> float:
    """Steps per second of that many episodes at a time."""
    server = OpenEnvServer(url)
    environments = [OpenEnvEnvironment(server, grader=None) for _ in range(sessions)]  # type: ignore[arg-type]
    async with server.running():
        for environment in environments:
            await environment.open(Task(key="t", prompt="Echo."))
            await environment.reset()
        steps = 0
        started = time.perf_counter()

        async def play(environment: OpenEnvEnvironment) -> None:
            nonlocal steps
            action = Action(episode_id="e", attempt=1, turn=0, text="hello")
            while time.perf_counter() < started + seconds:
                await environment.step(action)
                steps += 1

        async with anyio.create_task_group() as group:
            for environment in environments:
                group.start_soon(play, environment)
        elapsed = time.perf_counter() - started
        for environment in environments:
            await environment.close()
    return steps / elapsed


def through_plain_client(url: str, sessions: int, seconds: float) -> float:
    """Steps per second of the plain client, in a process of its own."""
    python = openenv_python()
    assert python is not None
    ran = subprocess.run(
        [python, PLAIN, url, str(sessions), str(seconds)], check=True, capture_output=True, text=True, timeout=seconds + 300
    )
    return float(ran.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if openenv_python() is None:
        print("no Python with openenv: run `just test-openenv` once, or set OPENENV_PYTHON", file=sys.stderr)
        return 2
    rounds = []
    with openenv_server("echo", 2 * given.sessions + 8) as url:
        for _ in range(given.rounds):
            plain = through_plain_client(url, given.sessions, given.seconds)
            ours = anyio.run(
                through_fleetbus, url, given.sessions, given.seconds, backend_options={"use_uvloop": sys.platform != "win32"}
            )
            rounds.append({"plain": round(plain, 1), "fleetbus": round(ours, 1), "ratio": round(ours / plain, 3)})
    facts = {
        "sessions": given.sessions,
        "seconds": given.seconds,
        "plain_steps_per_second": round(statistics.median(one["plain"] for one in rounds), 1),
        "fleetbus_steps_per_second": round(statistics.median(one["fleetbus"] for one in rounds), 1),
        "ratio": round(statistics.median(one["ratio"] for one in rounds), 3),
        "rounds": rounds,
    }
    if given.json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{facts['fleetbus_steps_per_second']} steps/s, plain client {facts['plain_steps_per_second']}: {facts['ratio']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
