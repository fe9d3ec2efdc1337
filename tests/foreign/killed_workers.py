"""Workers on a real server, each a process: killed by a test after results, and replaced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import anyio
import msgspec

from fleetbus.bus.base import Bus
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import EpisodeFinished, Task, encode
from tests.agents.test_agents_under_kills import SUBJECTS, build_request
from tests.agents.test_agents_under_kills import WORKER as PLAIN_WORKER

AT_ONCE = 16
WORKER = PLAIN_WORKER.replace(
    "from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate",
    "from tests.support.rule_policy import RuleSampler, RuleTemplate as ScriptedTemplate",
)


class Workers:
    """Two environment workers for a spec and an inference worker whose policy says ``lines``, by world; for one that is killed
    another is started."""

    def __init__(self, url: str, spec: str, lines: Mapping[str, Sequence[str]]) -> None:
        self._url, self._spec = url, spec
        self._code = WORKER.replace("ScriptedSampler(delay=lambda request: 0.05)", f"RuleSampler({dict(lines)!r}, seconds=0.3)")
        self._held = ExitStack()
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._count = 0

    def __enter__(self) -> Workers:
        for role in ("inference", "environment", "environment"):
            self._start(role)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _start(self, role: str) -> None:
        name, self._count = f"{role[0]}{self._count}", self._count + 1
        self._running[name] = (role, self._held.enter_context(self._worker(role, name)))

    @contextmanager
    def _worker(self, role: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([sys.executable, "-c", self._code, role, name, self._url, self._spec]) as process:
            try:
                yield process
            finally:
                process.kill()

    async def kill(self, name: str) -> None:
        """Harmless if it is killed already: what it stored before may be read after."""
        if name in self._running:
            role, process = self._running.pop(name)
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            self._start(role)

    async def kill_inference(self) -> None:
        await self.kill(next(name for name, (role, _) in self._running.items() if role == "inference"))


async def play_all(
    bus: Bus, tasks: Sequence[Task], heard: Callable[[int, EpisodeFinished], Awaitable[None]]
) -> list[list[EpisodeFinished]]:
    """An episode of each task, sixteen at once, until all have ended; their results. ``heard`` is called with the first result
    of each, and how many have one."""
    results: dict[str, list[EpisodeFinished]] = {}
    asked = 0
    async with bus.read([SUBJECTS.episodes]) as reader:
        while len(results) < len(tasks):
            while asked < len(tasks) and asked - len(results) < AT_ONCE:
                request = msgspec.structs.replace(build_request(bus, f"a{asked}"), task=tasks[asked])
                await bus.publish(SUBJECTS.task("default", request.episode_id), encode(request), expected_last=0)
                asked += 1
            entry = decode_episode_entry(await reader.receive())
            if isinstance(entry, EpisodeFinished):
                results.setdefault(entry.episode_id, []).append(entry)
                if len(results[entry.episode_id]) == 1:
                    await heard(len(results), entry)
    return [results[f"a{number}"] for number in range(len(tasks))]
