"""Clients of a simulated fleet: step-wise sessions, the calls of a gateway, and rollouts for an external trainer.

Each uses the library's own client and passes what it was told to the checkers. What it may fail with is judged here, too.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio

from fleetbus.bus.base import Bus
from fleetbus.client.rollouts import Episode, rollouts
from fleetbus.client.sessions import Session, SessionClient, SessionFailed, SessionUnavailable, sessions
from fleetbus.concurrency.runtime import Runtime
from fleetbus.config.settings import Configuration
from fleetbus.core.episode.history import loss_mask
from fleetbus.core.episode.segments import collect_segment_ids, find_leaves, fold_segments
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import GRADED, SessionAnswer, SessionCall, Subjects, Task
from fleetbus_workers.environment.stepwise.host import SessionHost
from fleetbus_workers.gateway.gym_methods import Answer, CallRefused, GymCalls
from fleetbus_workers.gateway.gym_wire import Request
from tests.simulation.judge.episode_checker import EpisodeChecker
from tests.simulation.judge.session_checker import SessionChecker
from tests.simulation.observer import Observer
from tests.simulation.platform.process import RUN, Process

SESSIONS_PER_CLIENT = 4
CALL_SECONDS = 150.0
"""A call is answered by then: a takeover after the worst of faults takes less, unless another fault follows."""

FLOOD_CALLS = 64
"""More than a worker takes at a time."""

REPEAT_SECONDS = 1.0
"""A gateway's client repeats after so long what was answered with 503."""

ROLLOUT_GROUPS = 4
ROLLOUT_GROUP_SIZE = 2


class SessionCaller:
    """One client that plays sessions of its own, one after the other, and sometimes two calls at a time."""

    def __init__(self, process: Process, checker: SessionChecker, observer: Observer, draw: random.Random) -> None:
        self._process = process
        self._checker = checker
        self._observer = observer
        self._draw = draw

    async def run(self, bus: Bus) -> None:
        async with sessions(bus, Subjects(RUN)) as client:
            for number in range(SESSIONS_PER_CLIENT):
                if self._process.drain.is_set():
                    return
                await self._play(client, f"{self._process.name}-s{number}")

    async def _play(self, client: SessionClient, name: str) -> None:
        turns = self._draw.randint(2, 6)
        since = anyio.current_time()
        try:
            async with client.open(Task(key=name, config={"turns": turns}), session=name, timeout=CALL_SECONDS) as session:
                for _ in range(self._draw.choice((1, 1, 2))):
                    self._checker.on_answer(await session.reset())
                    for turn in range(turns):
                        await anyio.sleep(self._draw.random() * self._draw.choice((0.1, 1.0, 8.0)))
                        if await self._step(session, f"{name} {turn}"):
                            break
                    await session.state()
                    self._checker.on_answer(await session.verify())
        except SessionFailed as failed:
            self._check_failure(failed.answer)
        except SessionUnavailable as unavailable:
            check_unavailable(self._observer, self._process, since, str(unavailable))

    async def _step(self, session: Session, text: str) -> bool:
        """One step, repeated at the same moment by a client that is impatient; True at the end of the episode."""
        answer = await session.step(text)
        self._checker.on_answer(answer)
        return answer.terminated

    def _check_failure(self, answer: SessionAnswer) -> None:
        """The session is over, and the log says so too, or it was called for too late."""
        pages = self._checker.pages.get(answer.session)
        right = pages is not None and bool(pages.end) and pages.end == answer.end
        right = right or (answer.refusal == "closed" and self._checker.is_refused(answer.session))
        right = right or (answer.refusal == "unknown" and self._checker.has_left(answer.session))
        detail = f"{answer.session}: {answer.refusal or answer.end} {answer.error_class} {answer.error}"
        self._observer.require(right, "a session fails by its end in the log only", detail)


class GatewayCaller:
    """A gateway and its clients in one process: each request has a key, and some are made twice."""

    def __init__(self, process: Process, checker: SessionChecker, observer: Observer, draw: random.Random) -> None:
        self._process = process
        self._checker = checker
        self._observer = observer
        self._draw = draw
        self._count = 0
        self.local_host: SessionHost | None = None
        """The worker in the gateway's own process, if there is one."""
        self.floods = False

    async def run(self, bus: Bus) -> None:
        async with sessions(bus, Subjects(RUN)) as client:
            if self.local_host is not None:
                client.add_local_host(self._process.name, self.local_host.call)
            calls = GymCalls(client, call_seconds=CALL_SECONDS)
            for _ in range(SESSIONS_PER_CLIENT):
                if self._process.drain.is_set():
                    return
                since = anyio.current_time()
                if self.floods:
                    await self._flood()
                try:
                    await self._play(calls)
                except SessionUnavailable as unavailable:
                    check_unavailable(self._observer, self._process, since, str(unavailable))

    async def _flood(self) -> None:
        """More calls of nobody's session than the gateway's own worker takes at a time; none of them waits for long."""

        async def call() -> None:
            asked = SessionCall(session="nobody", call="state", key=self._next_key())
            assert self.local_host is not None
            with suppress(RequestUnanswered):
                answer = await self.local_host.call(asked, anyio.current_time() + self._draw.choice((0.0, 60.0)))
                executed = answer is not None and not answer.refusal
                self._observer.require(not executed, "a wrong call is refused", f"nobody state: {answer}")

        async with anyio.create_task_group() as group:
            for _ in range(FLOOD_CALLS):
                group.start_soon(call)

    async def _play(self, calls: GymCalls) -> None:
        turns = self._draw.randint(2, 5)
        key = self._next_key()
        try:
            connected = await self._make(calls.connect, key, {"env_config": {"key": key, "turns": turns}, "seed": None})
        except CallRefused as refused:
            right = refused.status == 409 and self._checker.is_refused(key)
            self._observer.require(right, "a gateway refuses for what the log says", f"{key} connect: {refused}")
            return
        session = str(connected.fields["session_id"])
        for _ in range(self._draw.choice((1, 2))):
            await self._call(calls, session, "reset", {"seed": None})
            await self._call(calls, session, "system_prompt", {})
            for turn in range(turns + 1):
                stepped = await self._call(calls, session, "step", {"action_str": f"{key} {turn}"})
                if stepped is None or stepped.fields["done"]:
                    break
        await self._call(calls, session, "close", {})

    async def _call(self, calls: GymCalls, session: str, method: str, parameters: dict[str, Any]) -> Answer | None:
        """None where the session is over: it was idle for too long, or its worker could not be replaced."""
        fields = {"session_id": session, "method": method, "params": parameters}
        try:
            return await self._make(calls.call, self._next_key(), fields)
        except CallRefused as refused:
            ends = [pages.end for name, pages in self._checker.pages.items() if name.startswith(session)]
            self._observer.require(any(ends), "a gateway refuses for what the log says", f"{session} {method}: {refused}")
            return None

    async def _make(self, call: Callable[[Request], Awaitable[Answer]], key: str, fields: dict[str, Any]) -> Answer:
        """A request, and in every third case its repetition at the same time: both get the same answer. A gateway answers 503
        where the log does not, and its client repeats the request under the same key."""
        answers: list[Answer] = []
        errors: list[Exception] = []

        async def make() -> None:
            while True:
                try:
                    answers.append(await call(Request(fields=fields, key=key)))
                    self._observer.trace("gateway", key, fields.get("method", "connect"), answers[-1].fields)
                except RequestUnanswered:
                    await anyio.sleep(REPEAT_SECONDS)
                    continue
                except (CallRefused, SessionUnavailable) as error:
                    errors.append(error)
                return

        async with anyio.create_task_group() as group:
            for _ in range(self._draw.choice((1, 1, 2))):
                group.start_soon(make)
        if errors:
            raise errors[0]
        same = all(answer.fields == answers[0].fields for answer in answers)
        self._observer.require(same, "a repeated request gets the same answer", f"{key}: {answers}")
        return answers[0]

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._process.name}-g{self._count}"


def check_unavailable(observer: Observer, process: Process, since: float, detail: str) -> None:
    """A call gives up only if something went on for as long as it waited."""
    last = max((each.stop for each in observer.disturbances), default=0.0)
    excused = last >= anyio.current_time() - CALL_SECONDS or observer.message_fault_count(since)
    observer.require(bool(excused), "a session's call is answered", f"{process.name}: {detail}")


async def run_rollouts(
    process: Process, bus: Bus, configuration: Configuration, tasks: list[Task], episodes: EpisodeChecker, observer: Observer,
    runtime: Runtime,
) -> None:  # fmt: skip
    """Some groups for an external trainer, each episode compared with the log."""
    async with rollouts(
        bus, configuration, tasks[:ROLLOUT_GROUPS], group_size=ROLLOUT_GROUP_SIZE, groups_at_a_time=2, worker=process.name,
        runtime=runtime,
    ) as groups:  # fmt: skip
        async for group in groups:
            observer.require(len(group.episodes) == ROLLOUT_GROUP_SIZE, "a rollout group is whole", process.name)
            for episode in group.episodes:
                _check_rollout(episode, episodes, observer)
            if process.drain.is_set():
                return


def _check_rollout(episode: Episode, episodes: EpisodeChecker, observer: Observer) -> None:
    record = episodes.record[episode.episode_id]
    result = record.result
    if result is None:
        observer.violate("a rollout has its result in the log", episode.episode_id)
        return
    history = record.history(result.attempt)[: result.turns] if episode.outcome == result.outcome else ()
    owners = {turn: seat for seat in result.seats for turn in seat.turns}
    unseated = {turn for turn, seat in owners.items() if seat.reward is None} if result.outcome in GRADED else set()
    leaves = [leaf for leaf in find_leaves(fold_segments(history)) if not unseated.issuperset(leaf.turns)]
    expected = [collect_segment_ids(leaf, history) for leaf in leaves]
    right = [list(sequence.ids) for sequence in episode.sequences] == expected
    observer.require(right, "a rollout has the tokens of its result", f"{episode.episode_id}: {len(episode.sequences)}")
    trained = sum(sum(sequence.loss_mask) for sequence in episode.sequences)
    seated = all(
        {sequence.seat} == {owners[turn].name for turn in leaf.turns}
        for sequence, leaf in zip(episode.sequences, leaves, strict=False)
        if owners
    )
    observer.require(seated, "a rollout's sequence is one seat's", episode.episode_id)
    observer.require(
        trained == sum(loss_mask(history, unseated)), "a rollout's tokens are trained once", f"{episode.episode_id}: {trained}"
    )
    right = episode.reward == (result.reward if episode.outcome in GRADED else None)
    observer.require(right, "a rollout has the reward of its result", episode.episode_id)
    changed = episode.outcome != result.outcome
    observer.require(not changed, "a finished rollout is not lost", f"{episode.episode_id}: {episode.error}")
