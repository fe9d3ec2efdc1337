"""Many agents as shipped at once, while what serves them is killed, and what their log says afterwards.

The policy says another word in each sample. A relay between the agents and the gateways hears which of them arrived.
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec

from fleetbus.errors import PublishUnanswered, SequenceConflict
from fleetbus.log.episodes import decode_episode_entry
from fleetbus_schemas import Action, ChatMessage, EpisodeFinished, Observation, decode
from fleetbus_workers.environment.adapters.agent.conversations import read_content
from fleetbus_workers.environment.adapters.agent.paths import identify
from tests.agents.gateway_support import bearer
from tests.agents.tried.catalogue import Shipped
from tests.agents.tried.place import Place
from tests.agents.tried.play import PROMPT, post_reward, run_agent
from tests.agents.tried.policy import ANSWER, MARK
from tests.agents.tried.stage import SUBJECTS, Stage, Switch

INFERENCE_WORKERS = 3
TAKE_SECONDS = 300.0
"""For a session once no more are asked for: longer than an episode whose agent never calls is waited for (`limits.reset`)."""
LATER = ("nice", "-n", "5")
"""Agents after what serves them: 64 that start at once would keep a worker from ever being ready again."""

SAID = re.compile(rf"{MARK}[0-9a-f]{{16}}")


class Listening(Switch):
    """``arrived`` are the samples that agents got."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.arrived: set[str] = set()

    async def _listened(self, chunk: bytes) -> None:
        """What agents ask is large, and not kept."""

    async def _answered(self, chunk: bytes) -> None:
        self.arrived.update(SAID.findall(chunk.decode("utf-8", "replace")))


class Crowd:
    """Plays episodes until `close`; ``ended`` counts by kind and by what became of the agent."""

    def __init__(self, stage: Stage[Listening], environments: Path, scratch: Path) -> None:
        self._stage, self._environments, self._scratch = stage, environments, scratch
        self._open = True
        self._closed = anyio.Event()
        self.asked: set[str] = set()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.complaints: dict[str, str] = {}

    def close(self) -> None:
        """Agents that play end by themselves."""
        self._open = False
        self._closed.set()

    async def _take(self) -> dict[str, Any] | None:
        """The next session; None if there is none any more: one that was given in an answer that nobody got ends by itself."""
        session: dict[str, Any] | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_after_close, group.cancel_scope)
            session = await self._stage.take()
            group.cancel_scope.cancel()
        return session

    async def _end_after_close(self, scope: anyio.CancelScope) -> None:
        await self._closed.wait()
        await anyio.sleep(TAKE_SECONDS)
        scope.cancel()

    async def _request(self, episode: str) -> None:
        """Asked for again while the server is too busy to say that it has it."""
        while True:
            try:
                await self._stage.request(episode, PROMPT)
            except PublishUnanswered:
                continue
            except SequenceConflict:
                pass  # it had it
            return

    async def play(self, agent: Shipped, number: int) -> None:
        """One agent after another of this kind."""
        while self._open:
            episode = f"{agent.name}-{len(self.asked)}"
            self.asked.add(episode)
            await self._request(episode)
            if (session := await self._take()) is None:
                return
            home = self._scratch / f"{agent.name}-{number}"
            shutil.rmtree(home, ignore_errors=True)
            place = Place(self._environments / agent.place, home, session, PROMPT)
            said, status = await run_agent(self._stage, agent, place, session["id"], "calm", *LATER)
            right = ANSWER in said and status == 0
            self.ended[agent.name, "answered" if right else f"ended with {status}"] += 1
            if not right:
                self.complaints[session["id"]] = said[-300:]
            async with httpx.AsyncClient(timeout=90, headers=bearer(session)) as client:
                await post_reward(client, session, {"reward": float(right)})


async def kill_in_turn(stage: Stage[Listening], seconds: float, pause: float) -> int:
    """One of the inference workers and two gateways every few seconds, of four kills one is a gateway's. Returns how many."""
    places = itertools.cycle(range(INFERENCE_WORKERS))
    kills, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        await anyio.sleep(pause)
        if kills % 4 == 3:
            await stage.replace_gateway()
        else:
            stage.start_inference("disturbed", next(places))
        kills += 1
    return kills


class Books(msgspec.Struct, kw_only=True):
    """What the log says: episodes by outcome; calls; those of which it has two samples; turns that are trained, and those of
    them whose sample no agent got; episodes that were taken over, and of which there is no result. ``late``: samples of workers
    that answered an attempt which was over by then, in whose place another was sampled; no agent gets one, none is trained."""

    outcomes: Counter[str]
    calls: int
    twice: list[str]
    late: int
    trained: int
    unseen: list[str]
    undelivered: int
    taken_over: int
    missing: list[str]


async def read_books(stage: Stage[Listening], asked: set[str]) -> Books:
    results: dict[str, EpisodeFinished] = {}
    async for entry in stage.bus.scan([SUBJECTS.episodes]):
        if isinstance(decoded := decode_episode_entry(entry), EpisodeFinished):
            results[decoded.episode_id] = decoded
    observed: defaultdict[str, dict[int, Observation]] = defaultdict(dict)
    acted: defaultdict[str, dict[int, Action]] = defaultdict(dict)
    places: dict[int, Action] = {}
    async for entry in stage.bus.scan([SUBJECTS.observations(), SUBJECTS.actions()]):
        if entry.subject.split(".", 3)[2] == "obs":
            observation = decode(Observation, entry.payload)
            observed[observation.episode_id].setdefault(observation.turn, observation)
        else:
            action = decode(Action, entry.payload)
            places[entry.sequence] = action
    trained, unseen, twice = 0, [], []
    for episode, result in results.items():
        left_out = {each.turn for each in result.untrained}
        acted[episode] = {each.turn: places[each.sequence] for each in result.actions}
        twice += [f"{episode} {turns}" for turns in find_asked_twice(observed[episode], acted[episode])]
        for turn in set(range(result.turns)) - left_out if result.outcome == "completed" else ():
            trained += 1
            mark = SAID.search(acted[episode][turn].text)
            if mark is None or mark[0] not in stage.balancer.arrived:
                unseen.append(f"{episode} turn {turn}")
    return Books(
        outcomes=Counter(each.outcome for each in results.values()),
        calls=sum(map(len, acted.values())),
        twice=twice + find_sampled_twice(places.values()),
        late=len(places) - sum(map(len, acted.values())),
        trained=trained,
        unseen=unseen,
        undelivered=sum(each.reason == "not_delivered" for result in results.values() for each in result.untrained),
        taken_over=sum(each.attempt > 1 for each in results.values()),
        missing=sorted(asked - results.keys()),
    )


def find_sampled_twice(actions: Iterable[Action]) -> list[str]:
    """Turns of an attempt that have two samples."""
    counted = Counter(f"{each.episode_id} attempt {each.attempt} turn {each.turn}" for each in actions)
    return [turn for turn, count in counted.items() if count > 1]


def find_asked_twice(observed: dict[int, Observation], acted: dict[int, Action]) -> list[list[int]]:
    """Turns of an episode that answer the same conversation, message for message."""
    paths: dict[int, list[bytes]] = {}
    turns: defaultdict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for turn in sorted(observed):
        seen = observed[turn]
        path = paths.setdefault(seen.segment, [])
        path += [identify(message) for message in seen.messages]
        turns[tuple(path)].append(turn)
        if (action := acted.get(turn)) is not None:
            path.append(identify(ChatMessage(role="assistant", content=read_content(action), tool_calls=action.tool_calls)))
    return [each for each in turns.values() if len(each) > 1]
