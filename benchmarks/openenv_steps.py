"""Steps per second through the OpenEnv adapter, beside the plain OpenEnv client, against one real server in the same run.

Needs a Python with `openenv` (`just test-openenv` makes one, or ``OPENENV_PYTHON`` names it). The two take turns of a
second, so that a slow machine slows both; the figure is the median of the rounds' ratios. A step here is one action of a
policy: its text parsed, one frame to the server and back, the observation as the policy would read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.openenv.environment import OpenEnvEnvironment
from fleetbus_workers.environment.adapters.openenv.server import OpenEnvServer
from tests.support.openenv_process import openenv_python, openenv_server

PLAIN = Path(__file__).with_name("openenv_plain_client.py")


async def measure_rounds(url: str, sessions: int, seconds: float, rounds: int) -> list[dict[str, float]]:
    """Steps per second of both, round by round; all sessions stay open."""
    python = openenv_python()
    assert python is not None
    server = OpenEnvServer(url)
    environments = [OpenEnvEnvironment(server, grader=None) for _ in range(sessions)]  # type: ignore[arg-type]
    found = []
    with subprocess.Popen([python, PLAIN, url, str(sessions)], stdin=PIPE, stdout=PIPE, text=True) as plain:
        assert plain.stdin is not None
        assert plain.stdout is not None
        try:
            assert plain.stdout.readline() == "ready\n"
            async with server.run():
                for environment in environments:
                    await environment.open(Task(key="t", prompt="Echo."))
                    await environment.reset()
                for _ in range(rounds):
                    print(seconds, file=plain.stdin, flush=True)
                    theirs = float(await anyio.to_thread.run_sync(plain.stdout.readline))
                    ours = await measure_rate(environments, seconds)
                    found.append({"plain": round(theirs, 1), "fleetbus": round(ours, 1), "ratio": round(ours / theirs, 3)})
                for environment in environments:
                    await environment.close()
        finally:
            plain.kill()
    return found


async def measure_rate(environments: list[OpenEnvEnvironment], seconds: float) -> float:
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
    return steps / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if openenv_python() is None:
        print("no Python with openenv: run `just test-openenv` once, or set OPENENV_PYTHON", file=sys.stderr)
        return 2
    backend = {"use_uvloop": sys.platform != "win32"}
    with openenv_server("echo", 2 * given.sessions) as url:
        rounds = anyio.run(measure_rounds, url, given.sessions, given.seconds, given.rounds, backend_options=backend)
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
