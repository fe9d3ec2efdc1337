"""One episode without a bus: the stages of a worker, their limits and checks, and what was said.

Above it is `fleetbus_workers.environment.check.report`; below it an environment and a `Policy`.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from fleetbus.config.seat_limits import parse_seat_limits
from fleetbus.config.seats import build_seats
from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms.reward_components import find_reward_problem
from fleetbus.core.text.tool_calls import parse_tool_calls
from fleetbus_schemas import Action, ChatMessage, Task, ToolSpec
from fleetbus_schemas.seat import map_by_seat
from fleetbus_workers.environment.base import Environment, FailedVerdict, ShowsWhole, Start, Step, Verdict
from fleetbus_workers.environment.check.policies import Policy
from fleetbus_workers.environment.episode.seats import UNSEATED, EpisodeSeats, SeatError
from fleetbus_workers.environment.episode.stages import EpisodeEnded, Stages
from fleetbus_workers.environment.failure_location import format_traceback, locate_error, locate_method, shows_other_code
from fleetbus_workers.environment.normalization import clip_messages
from fleetbus_workers.environment.validation import check_messages, validate_return

TICK_SECONDS = 0.02
BLOCKED_SECONDS = 0.5
"""A call during which nothing else runs for so long stops all other episodes of a worker."""

T = TypeVar("T")


OF_OTHERS = "run.seats"
"""Begins what is said of seats that other policies play."""

OF_LIMITS = "episode.seat_limits"
"""Begins what is said of limits of seats."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong; ``is_failure`` if episodes of it would not be trained. ``location`` is FILE:LINE in FUNCTION."""

    text: str
    location: str = ""
    traceback: str = ""
    is_failure: bool = True


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: what the environment showed and what the policy answered, in which seat if there are several."""

    messages: tuple[ChatMessage, ...]
    said: str
    reward: float = 0.0
    seat: str = ""


class PlayedEpisode(msgspec.Struct, kw_only=True):
    """All of one episode. ``rendered_tools`` are those that the model's chat template describes. ``seconds`` are by stage,
    ``longest_step`` in seconds; ``last`` is what the last step showed; ``unopened`` says why it could not begin if that is not
    the fault of any code of the user's: a server does not answer."""

    tools: tuple[ToolSpec, ...] = ()
    rendered_tools: tuple[ToolSpec, ...] = ()
    exchanges: list[Exchange] = []
    last: tuple[ChatMessage, ...] = ()
    ending: str = "not ended"
    verdict: Verdict | None = None
    problems: list[Problem] = []
    seconds: dict[str, float] = {}
    longest_step: float = 0.0
    unopened: str = ""

    @property
    def has_failed(self) -> bool:
        return any(problem.is_failure for problem in self.problems)


async def play_episode(
    make: Callable[[], Environment], task: Task, policy: Policy, configuration: Configuration, *, turns: int
) -> PlayedEpisode:
    """Play one episode to its end, or for ``turns``; what goes wrong becomes problems of it."""
    player = _Player(task, policy, configuration, turns)
    await player.play(make)
    return player.episode


class _Player:
    def __init__(self, task: Task, policy: Policy, configuration: Configuration, turns: int) -> None:
        self._task = task
        self._policy = policy
        self._limits = configuration.limits
        self._observation_bytes = configuration.environment.observation_bytes
        self._max_abs_reward = configuration.environment.max_abs_reward
        self._turns = turns
        self._stages = Stages()
        self._said: defaultdict[str, list[ChatMessage]] = defaultdict(list)
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._longest_gap = self._call_began = 0.0
        self._seats = UNSEATED
        self._is_cut_short = False
        self._others = map_by_seat(build_seats(configuration))
        self._seat_limits = map_by_seat(parse_seat_limits(configuration.episode.seat_limits))
        self.episode = PlayedEpisode()

    async def play(self, make: Callable[[], Environment]) -> None:
        try:
            environment = make()
        except Exception as error:  # noqa: BLE001 - a user's class: all that it raises is to be shown
            self._fail(f"the environment cannot be made: {type(error).__name__}: {error}", locate_error(error), error)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._measure_gaps)
            try:
                await self._run(environment)
            except EpisodeEnded as ended:
                self._fail(f"{ended.error_class}: {ended.error}", ended.location, ended)
                if not ended.location and self._stages.timings.keys() == {"open"}:
                    self.episode.unopened = ended.error.removeprefix("open: ")
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close(environment)
                self.episode.seconds = dict(self._stages.timings)
            tasks.cancel_scope.cancel()

    async def _run(self, environment: Environment) -> None:
        with self._stages.time_limit("open", self._limits.open):
            await self._call(environment, "open", environment.open(self._task))
        with self._stages.time_limit("reset", self._limits.reset):
            start = validate_return(Start, await self._call(environment, "reset", environment.reset()), "reset", environment)
        self._check_start(start, environment)
        shown = self._clip(start.messages, environment, whole=start.prompted)
        self._seats = EpisodeSeats(start.seat, self._others, self._seat_limits)
        self._tools[start.seat] = self.episode.tools
        for turn in range(self._turns):
            step = await self._step(environment, turn, shown)
            self.episode.last = shown = self._clip(step.messages, environment)
            if step.terminated or step.truncated:
                self.episode.ending = "terminated" if step.terminated else "truncated by the environment"
                break
            if self._seats.is_at_limit():
                self.episode.ending, self._is_cut_short = f"truncated: {self._seats.describe_limit(1)[1]}", True
                break
        else:
            self.episode.ending, self._is_cut_short = f"stopped after {self._turns} turns", True
        with self._stages.time_limit("state", self._limits.step):
            self._check_encodable(validate_return(dict, await environment.state(), "state", environment), "state", environment)
        with self._stages.time_limit("verify", self._limits.verify):
            verdict = await self._call(environment, "verify", environment.verify())
            self.episode.verdict = validate_return(Verdict, verdict, "verify", environment)
        self._check_verdict(self.episode.verdict, environment)

    def _clip(self, messages: tuple[ChatMessage, ...], environment: Environment, whole: int = 0) -> tuple[ChatMessage, ...]:
        """The messages as a policy is shown them in a run."""
        if isinstance(environment, ShowsWhole) and environment.shows_whole:
            return messages
        return clip_messages(messages, self._observation_bytes, whole)

    async def _step(self, environment: Environment, turn: int, shown: tuple[ChatMessage, ...]) -> Step:
        said = self._said[self._seats.current]
        said += shown
        text = self._policy(tuple(said), self._tools.get(self._seats.current, ()))
        said.append(ChatMessage(role="assistant", content=text))
        action = Action(episode_id="check", attempt=1, turn=turn, text=text, tool_calls=parse_tool_calls(text).calls)
        began = time.perf_counter()
        with self._stages.limit_step(environment, self._limits):
            step = validate_return(Step, await self._call(environment, "step", environment.step(action)), "step", environment)
        self.episode.longest_step = max(self.episode.longest_step, time.perf_counter() - began)
        self.episode.exchanges.append(Exchange(messages=shown, said=text, reward=step.reward, seat=self._seats.current))
        self._follow_seats(turn, step, environment)
        self._check_reward(step.reward, "step", environment)
        self._check_encodable(step.info, "step", environment)
        if not step.messages and not (step.terminated or step.truncated):
            self._fail("step returned no messages and did not end the episode", locate_method(environment, "step"))
        return step

    def _follow_seats(self, turn: int, step: Step, environment: Environment) -> None:
        """A seat stands for its context here: nothing is left out of one."""
        self._seats.append(turn, turn)
        if step.terminated or step.truncated:
            return
        location = locate_method(environment, "step")
        try:
            change = self._seats.take(msgspec.structs.replace(step, context=None))
        except SeatError as error:
            self._fail(str(error), location)
            return
        if change is not None and change.resume is None:
            self._tools[self._seats.current] = change.tools
            for problem in find_tool_problems(change.tools):
                self._fail(problem, location)
        elif step.tools not in ((), self._tools.get(self._seats.current)):
            self._warn("Step.tools are read when a seat acts for the first time only; these change nothing", location)

    async def _call(self, environment: Environment, call: str, work: Awaitable[T]) -> T:
        """The result of a call; that it blocked the event loop is a problem."""
        self._longest_gap, self._call_began = 0.0, time.perf_counter()
        result = await work
        if time.perf_counter() - self._call_began > BLOCKED_SECONDS:
            await anyio.sleep(2 * TICK_SECONDS)
        if (seconds := self._longest_gap) > BLOCKED_SECONDS:
            self._warn(
                f"{call} blocked the event loop for {seconds:.1f} s: all other episodes of the worker waited",
                locate_method(environment, call),
            )
        return result

    async def _measure_gaps(self) -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(TICK_SECONDS)
            # what the policy took before the call is not the environment's doing
            self._longest_gap = max(self._longest_gap, time.perf_counter() - max(began, self._call_began))

    def _check_start(self, start: Start, environment: Environment) -> None:
        check_messages(start.messages)
        self.episode.tools = start.tools or start.offered
        self.episode.rendered_tools = start.tools
        location = locate_method(environment, "reset")
        if not start.messages:
            self._fail("reset returned no messages: the policy has nothing to answer", location)
        for problem in find_tool_problems(self.episode.tools):
            self._fail(problem, location)
        self._check_encodable(start.info, "reset", environment)

    def _check_verdict(self, verdict: Verdict, environment: Environment) -> None:
        if verdict.reward is None:
            location = locate_method(environment, "verify")
            if isinstance(verdict, FailedVerdict):
                self._fail(f"verify gave no verdict: {verdict.reason}", location)
            elif verdict.reason:
                self._warn(f"verify gave no verdict: {verdict.reason}", location)
            else:
                self._fail("verify gave no verdict and no reason: an episode without one is never trained", location)
            return
        self._check_reward(verdict.reward, "verify", environment)
        seats, location = self._seats.describe(verdict.seats, verdict.reward), locate_method(environment, "verify")
        only_others = self._is_cut_short and all(seat.name in self._others for seat in seats)
        if seats and not only_others and all(seat.reward is None for seat in seats):
            self._fail("no seat has a reward: Verdict.seats gives them by name; such an episode is never trained", location)
        acted = {seat.name for seat in seats}
        absent = ", ".join(sorted(verdict.seats.keys() - acted))
        for name in sorted(self._others.keys() - acted):
            who = f"the seats that acted are {', '.join(sorted(acted))}" if acted else "it has no seats"
            self._warn(f"{OF_OTHERS} gives the seat {name} to another policy, and here it did not act: {who}", location)
        for name in sorted(self._seat_limits.keys() - acted - self._others.keys()):
            who = f"the seats that acted are {', '.join(sorted(acted))}" if acted else "the episode has no seats"
            self._warn(f"{OF_LIMITS} limits the seat {name}, and here it did not act: {who}", location)
        for seat in seats:
            if seat.name in self._others:
                continue
            if seat.reward is not None:
                self._check_reward(seat.reward, "verify", environment)
            elif seat.name not in verdict.seats:
                named = f", and names {absent}, which did not act" if absent else ""
                self._warn(f"the seat {seat.name} is never trained: {seat.reason}{named}", location)
            elif verdict.seats[seat.name] is not None:
                self._warn(f"the seat {seat.name} is not trained: {seat.reason}", location)
        if absent and not seats:
            self._warn(f"Verdict.seats names {absent}, and the episode has no seats: Start.seat names the first", location)
        paid = sum(exchange.reward for exchange in self.episode.exchanges)
        if paid and not verdict.reward:
            self._warn(
                f"the steps were rewarded {paid:g} and the verdict is 0: a verdict is the total, steps included",
                locate_method(environment, "verify"),
            )

    def _check_reward(self, reward: float, call: str, environment: Environment) -> None:
        if find_reward_problem([reward], self._max_abs_reward):
            limit = f"{self._max_abs_reward:g}"
            text = f"{call} was rewarded {reward:g}; it must be a number from -{limit} to {limit}"
            self._fail(text, locate_method(environment, call))

    def _check_encodable(self, value: object, call: str, environment: Environment) -> None:
        try:
            msgspec.msgpack.encode(value)
        except Exception as error:  # noqa: BLE001 - whatever an encoder makes of a foreign object is what is to be shown
            self._warn(f"{call}: {error}; only JSON-like values reach the log", locate_method(environment, call))

    async def _close(self, environment: Environment) -> None:
        try:
            with self._stages.time_limit("close", self._limits.close):
                await environment.close()
        except EpisodeEnded as ended:
            self._fail(f"close: {ended.error_class}: {ended.error}", ended.location, ended)

    def _fail(self, text: str, location: str, error: BaseException | None = None) -> None:
        cause = error.__cause__ if isinstance(error, EpisodeEnded) and error.__cause__ else error
        traceback = format_traceback(cause) if cause is not None and shows_other_code(cause) else ""
        self._add(Problem(text=text, location=location, traceback=traceback))

    def _warn(self, text: str, location: str) -> None:
        self._add(Problem(text=text, location=location, is_failure=False))

    def _add(self, problem: Problem) -> None:
        if problem not in self.episode.problems:
            self.episode.problems.append(problem)


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})


def find_tool_problems(tools: Sequence[ToolSpec]) -> list[str]:
    """One line for each thing that is wrong with the tools."""
    problems = [f"two tools are called {name}" for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    for tool in tools:
        if not _NAME.fullmatch(tool.name):
            problems.append(f"tool {tool.name!r}: a name has 1 to 64 letters, digits, _, . or -")
        problems += [f"tool {tool.name}: {problem}" for problem in _find_schema_problems(tool.parameters, "parameters")]
        if tool.parameters and tool.parameters.get("type") not in (None, "object"):
            problems.append(f"tool {tool.name}: parameters.type is {tool.parameters['type']!r}; it must be 'object'")
    return problems


def _find_schema_problems(schema: object, where: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where} must be a JSON Schema, not {type(schema).__name__}"
        return
    kinds = schema.get("type", ())
    for kind in kinds if isinstance(kinds, list | tuple) else (kinds,):
        if not (isinstance(kind, str) and kind in _TYPES):
            yield f"{where}.type is {kind!r}; JSON Schema has {', '.join(sorted(_TYPES))}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{where}.properties must be an object"
        return
    yield from _find_required_problems(schema.get("required", ()), properties, where)
    for name, inner in properties.items():
        yield from _find_schema_problems(inner, f"{where}.{name}")
    if "items" in schema:
        yield from _find_schema_problems(schema["items"], f"{where}.items")


def _find_required_problems(required: object, properties: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(required, (str, bytes)) or not isinstance(required, Iterable):
        yield f"{where}.required must be a list of names"
        return
    for name in required:
        if not (isinstance(name, str) and name in properties):
            yield f"{where}.required names {name!r}, which is no property"
