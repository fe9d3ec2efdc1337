"""Environments for simulations: what they show depends on every action before, and anything may go wrong at any stage.

A wrong, missing or doubled action shows in the next observation and in the reward. `EnvironmentRecord` keeps what really
happened with
one attempt's environment, for the checks to compare with what was recorded.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import structlog

from fleetbus_schemas import Action, ChatMessage, ContextChange, Task
from fleetbus_workers.environment.base import Ahead, EnvironmentFailed, Start, Step, Verdict
from tests.simulation.observer import Observer
from tests.simulation.platform.process import Process
from tests.simulation.scenario.shape import CALM, FaultProfile

STAGES = ("open", "reset", "step", "verify", "close")
SLOW_SECONDS = 9.0
"""The longest that a slow stage takes; no limit is shorter."""


RELEASE_SECONDS = 0.2
FAILED_RELEASES = 0.3


class EnvironmentRecord(msgspec.Struct, kw_only=True):
    """What happened with the environment of one attempt.

    ``fault_profile``: stages that hung, raised, or gave an odd verdict; ``idle_seconds``: from its last call until it was
    closed.
    """

    process: Process
    episode: str
    attempt: int
    closes: int = 0
    closed: bool = False
    idle_seconds: float = 0.0
    called: int = 0
    """Calls in work."""
    called_until: float = 0.0
    reward: float | None = None
    acted: list[str] = msgspec.field(default_factory=list)
    """The seat of each action that was executed; empty texts without seats."""
    seats: dict[str, float | None] = msgspec.field(default_factory=dict)
    fault_profile: set[str] = msgspec.field(default_factory=set)
    diverges: bool = False


def is_selected(name: str, share: float) -> bool:
    """True for that share of all names; always the same ones."""
    return share > 0 and int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") < share * 2**32


def render_observation(start: str, sampled: list[bytes]) -> str:
    """What a replayable environment shows after these actions."""
    digest = hashlib.blake2b(start.encode(), digest_size=6)
    for action in sampled:
        digest.update(action)
        digest.update(b"/")
    return digest.hexdigest()


def compute_reward(seen: str) -> float:
    """In (0, 1], never 0: a zero would be an infrastructure failure that became a reward."""
    return (1 + int(seen[:2], 16) % 4) / 4


def compute_seat_reward(seat: str, seen: str) -> float | None:
    """Of one seat, in (0, 1]; one time in four there is none, as of one that is played by somebody else."""
    drawn = hashlib.blake2b(f"{seat}/{seen}".encode(), digest_size=1).digest()[0] % 8
    return None if drawn < 2 else drawn / 8


class SimulatedEnvironment:
    """One episode's world, or one of a step-wise ``session``; ``draw`` decides what goes wrong with this very instance,
    ``register`` hears when it is opened. After the share ``segments`` of its steps the policy's context changes. With ``seats``
    what it shows decides which of so many acts next; another policy plays ``other_seat``. After the share ``ahead`` of its
    steps it tells turns ahead: of its other seats, or of sub-agents. Steps take ``work`` times as long."""

    def __init__(
        self,
        process: Process,
        fault_profile: FaultProfile,
        *,
        replayable: bool,
        segments: float,
        ahead: float,
        seats: int,
        other_seat: str,
        is_other_trained: bool = False,
        seed: int,
        draw: random.Random,
        observer: Observer,
        register: Callable[[EnvironmentRecord], None],
        session: str = "",
        work: float = 1.0,
    ) -> None:
        context: dict[str, Any] = {"episode": session, "attempt": 0}
        context |= {} if session else structlog.contextvars.get_contextvars()
        self.environment_record = EnvironmentRecord(
            process=process, episode=str(context["episode"]), attempt=int(context["attempt"])
        )
        self._is_session = bool(session)
        self._pace = work
        self.replayable = replayable
        self._fault_profile = fault_profile
        self._segments = segments
        self._ahead = ahead
        self._told: deque[Ahead] = deque()
        self._seat = ""
        self._seats = seats
        self._other_seat = other_seat
        self._frozen_seat = "" if is_other_trained else other_seat
        self._seed = seed
        self._draw = draw
        self._observer = observer
        self._register = register
        self._sampled: list[bytes] = []
        self._turns = 0
        self._start = ""
        self.environment_record.diverges = draw.random() < fault_profile.diverge
        self._salt = str(draw.random()) if not replayable or self.environment_record.diverges else ""

    @property
    def _mischief(self) -> FaultProfile:
        return CALM if self._observer.has_healed else self._fault_profile

    async def open(self, task: Task) -> None:
        self._register(self.environment_record)
        self._hold(1)
        self._turns = int(task.config["turns"])
        self._start = f"{task.key}{self._salt}"
        await self._work("open", 0.3)

    async def reset(self) -> Start:
        await self._work("reset", 0.1)
        self._seat = self._choose_seat()
        return Start(messages=(ChatMessage(role="user", content=self._render()),), seat=self._seat, ahead=self._tell_ahead())

    async def step(self, action: Action) -> Step:
        await self._work("step", 0.4)
        if is_selected(f"{self._seed}/poison/{self.environment_record.episode}", self._mischief.poison_episode):
            await self._kill_worker()
        acted = self._seat
        self.environment_record.acted.append(acted)
        self._sampled.append(action.sampled or action.text.encode())
        failed = is_selected(self._render(), self._mischief.tool_error)
        if len(self._sampled) >= self._turns:
            return Step(terminated=True, tool_calls=1, tool_errors=int(failed))
        step = Step(reward=self._compute_turn_reward(), tool_calls=1, tool_errors=int(failed))
        if self._told:
            told = self._told.popleft()
            self._seat = told.seat
            return msgspec.structs.replace(step, messages=told.messages, context=told.context, seat=told.seat)
        shown, self._seat = ChatMessage(role="tool", content=self._render()), self._choose_seat()
        change = self._choose_context() if self._seat == acted else None
        return msgspec.structs.replace(step, messages=(shown,), context=change, seat=self._seat, ahead=self._tell_ahead())

    def _tell_ahead(self) -> tuple[Ahead, ...]:
        """The same after the same actions: each other seat, or two sub-agents and the first context again."""
        if self._seat == self._other_seat != "" or not is_selected(f"ahead/{self._seed}/{self._render()}", self._ahead):
            return ()
        if self._seats:
            names = [f"seat-{number}" for number in range(self._seats)]
            seats = [name for name in names if name not in (self._seat, self._other_seat)]
            told = [Ahead(messages=self._show_ahead(seat), seat=seat) for seat in seats]
        else:
            changes = (ContextChange(reason="sub_agent"), ContextChange(reason="sub_agent"), ContextChange(resume=0))
            told = [Ahead(messages=self._show_ahead(str(number)), context=each) for number, each in enumerate(changes)]
        self._told.extend(told)
        return tuple(told)

    def _show_ahead(self, name: str) -> tuple[ChatMessage, ...]:
        return (ChatMessage(role="user", content=f"{self._render()}{name}"),)

    def _choose_seat(self) -> str:
        """The same after the same actions. Another policy never begins: an episode of one turn would train nothing."""
        seat = f"seat-{int(self._render()[-4:], 16) % self._seats}" if self._seats else ""
        return "seat-0" if seat and seat == self._other_seat and not self._sampled else seat

    def _choose_context(self) -> ContextChange | None:
        """The same after the same actions: turns dropped, a new prompt, or back to the first segment."""
        name = f"segments/{self._seed}/{self._render()}"
        if not is_selected(name, self._segments):
            return None
        match hashlib.blake2b(name.encode(), digest_size=1).digest()[0] % 4:
            case 0 if not self._seats:
                return ContextChange(resume=0)
            case 1:
                return ContextChange(reason="sub_agent")
            case turns:
                return ContextChange(keep_turns=max(turns - 1, 0))

    async def state(self) -> dict[str, Any]:
        return {"actions": len(self._sampled)}

    async def verify(self) -> Verdict:
        await self._work("verify", 0.2)
        if self._draw.random() < self._mischief.odd_verdict:
            self.environment_record.fault_profile.add("verify")
            return Verdict(reward=self._draw.choice((None, math.nan)), reason="no verdict")
        record, seen = self.environment_record, self._render()
        record.reward = compute_reward(seen)
        rewards = {seat: compute_seat_reward(seat, seen) for seat in dict.fromkeys(record.acted)} if self._seats else {}
        record.seats = {seat: None if seat == self._frozen_seat else reward for seat, reward in rewards.items()}
        if record.seats and all(reward is None for reward in record.seats.values()):
            record.fault_profile.add("verify")
        return Verdict(reward=record.reward, seats=rewards)

    async def close(self) -> None:
        self.environment_record.closes += 1
        self.environment_record.idle_seconds = anyio.current_time() - self.environment_record.called_until
        try:
            await self._work("close", 0.2)
            self.environment_record.closed = True
        finally:
            self._hold(-1)

    @property
    def label(self) -> str:
        """Of what it has open; empty before that."""
        return self._start

    def _hold(self, count: int) -> None:
        if self._is_session:
            self.environment_record.process.hold(sessions=count)
        else:
            self.environment_record.process.hold(environments=count)

    def _render(self) -> str:
        return render_observation(self._start, self._sampled)

    def _compute_turn_reward(self) -> float:
        if self._draw.random() < self._mischief.fail:
            self.environment_record.fault_profile.add("step")
            return math.nan
        return 0.0

    async def _work(self, stage: str, seconds: float) -> None:
        """Take some time, or too much, or fail."""
        self.environment_record.called += 1
        try:
            await self._fail_or_wait(stage, seconds)
        finally:
            self.environment_record.called -= 1
            self.environment_record.called_until = anyio.current_time()

    async def _fail_or_wait(self, stage: str, seconds: float) -> None:
        chance = self._draw.random()
        pace = self._pace if stage == "step" else 1.0
        seconds *= pace * (0.5 + self._draw.random())
        if chance < self._mischief.hang:
            self._trace(stage, "hang")
            await anyio.sleep_forever()
        if chance < self._mischief.hang + self._mischief.slow:
            seconds += self._draw.random() * (SLOW_SECONDS * pace - seconds)
        await anyio.sleep(seconds)
        if 1 - chance < self._mischief.fail:
            self._trace(stage, "raise")
            raise self._draw.choice((EnvironmentFailed("the server is gone"), ValueError("odd"), TimeoutError()))

    def _trace(self, stage: str, what: str) -> None:
        self.environment_record.fault_profile.add(stage)
        self._observer.trace("environment", self.environment_record.episode, self.environment_record.attempt, stage, what)

    async def _kill_worker(self) -> None:
        self.environment_record.process.crash()
        await anyio.sleep_forever()


class HoldingEnvironment(SimulatedEnvironment):
    """One that holds something which outlives a killed worker."""

    @property
    def held(self) -> str:
        return self.label

    async def release(self, task: Task, held: str) -> None:
        self._observer.trace("release", task.key, held)
        await anyio.sleep(RELEASE_SECONDS)
        if self._draw.random() < FAILED_RELEASES:
            raise EnvironmentFailed("the other server does not answer")
