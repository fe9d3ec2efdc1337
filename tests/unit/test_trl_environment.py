"""Environments of a run as TRL's: what it calls on them, and what it is given when they fail. A real `GRPOTrainer` plays them
in tests/trainers/test_trl_environments.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus.client.sessions import SessionFailed, SessionUnavailable
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, Image, SessionAnswer, SessionCall, Task, ToolCall, ToolOutput, ToolSpec, encode
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded, EpisodeUnanswered
from fleetbus_workers.trainers.trl_environment import FleetbusEnvironments
from fleetbus_workers.trainers.trl_episode import OVER
from tests.gateway.test_trainers_page import shown

FIND = ToolSpec(
    "find", "Find an item.", {"properties": {"name": {"type": "string", "description": "Its name."}}, "required": ["name"]}
)
TOLD = (ChatMessage(role="system", content="You have tools."), ChatMessage(role="user", content="How many nails?"))


class FakeSession:
    """``fails``: the turn that the environment fails at, -1 for the reset; ``ends``: the turn that ends the episode."""

    def __init__(self, fails: int = 0, ends: int = 0, tools: Sequence[ToolSpec] = (FIND,), **verdict: Any) -> None:
        self._fails, self._ends, self._tools = fails, ends, tuple(tools)
        self._verdict = {"reward": 1.0, "unpaid": 1.0} | verdict
        self.turns: list[str | ToolCall] = []
        self.closed = 0
        self.first = TOLD

    async def request(self, kind: str, task: Task | None = None, tool_calls: Sequence[ToolCall] = ()) -> SessionAnswer:
        return await self._take(tool_calls[0]) if tool_calls else answer()

    async def reset(self) -> SessionAnswer:
        if self._fails < 0:
            raise SessionFailed(answer(end="env_failed", error="the server does not start"))
        return answer(messages=self.first, tools=self._tools, prompted=int(bool(self._tools)))

    async def step(self, text: str) -> SessionAnswer:
        return await self._take(text)

    async def _take(self, turn: str | ToolCall) -> SessionAnswer:
        self.turns.append(turn)
        if len(self.turns) == self._fails:
            raise SessionFailed(answer(end="env_failed", error="the server is gone"))
        told = ChatMessage(role="user", content=f"Tool result:\n{len(self.turns)}")
        output = ToolOutput(text=f"{len(self.turns)}") if isinstance(turn, ToolCall) else None
        return answer(messages=(told,), output=output, terminated=len(self.turns) == self._ends)

    async def verify(self) -> SessionAnswer:
        return answer(**self._verdict)

    async def close(self) -> None:
        self.closed += 1


class AwaySession(FakeSession):
    async def request(self, kind: str, task: Task | None = None, tool_calls: Sequence[ToolCall] = ()) -> SessionAnswer:
        raise SessionUnavailable("no answer to open within 600 s: no free slot")


class SilentSession(FakeSession):
    """Answers until the first step."""

    async def _take(self, turn: str | ToolCall) -> SessionAnswer:
        self.turns.append(turn)
        raise SessionUnavailable("no answer to step within 600 s")


class EncodingSession(FakeSession):
    """Encodes what it is told, as a real one does."""

    async def _take(self, turn: str | ToolCall) -> SessionAnswer:
        told = {"tool_calls": (turn,)} if isinstance(turn, ToolCall) else {"text": turn}
        encode(SessionCall(session="s", call="step", key="0", **told))  # type: ignore[arg-type]
        return await super()._take(turn)


class MeetingSession(FakeSession):
    """The first close ends once another one has begun."""

    closing = 0
    met: anyio.Event

    async def close(self) -> None:
        MeetingSession.closing += 1
        if MeetingSession.closing == 1:
            MeetingSession.met = anyio.Event()
            with anyio.fail_after(5):
                await MeetingSession.met.wait()
        MeetingSession.met.set()


class FakeClient:
    """Hands out the given sessions, one after another, the first to the look at the tools."""

    def __init__(self, *sessions: FakeSession) -> None:
        self.sessions = [*sessions]

    def session(self, *, timeout: float) -> FakeSession:
        return self.sessions.pop(0)

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return anyio.run(function, *args)

    async def wait(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await function(*args)


def answer(**fields: Any) -> SessionAnswer:
    return SessionAnswer(session="s", key="0", **fields)


def connect(patch: pytest.MonkeyPatch, *sessions: FakeSession, envs: tuple[str, str] = ("", "")) -> None:
    client = cast("SharedClient", FakeClient(*sessions))
    tasks = {key: Task(key=key, env=env) for key, env in zip("tu", envs, strict=True)}
    source = EpisodeSource(client=client, tasks=tasks, retries=1)
    patch.setattr(EpisodeSource, "open", lambda *_, **__: source)
    patch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_dict=lambda columns: columns)))


def make(patch: pytest.MonkeyPatch, *sessions: FakeSession, count: int = 1) -> tuple[FleetbusEnvironments, list[Any]]:
    """Environments that have begun their episodes."""
    connect(patch, FakeSession(tools=sessions[0]._tools), *sessions)
    environments = FleetbusEnvironments(tasks=[])
    assert callable(environments.factory)
    made = [environments.factory() for _ in range(count)]
    for environment in made:
        environment.reset(task_key="t", prompt=[{"role": "user", "content": ""}])
    return environments, made


def say(text: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} | fields]


def test_a_tool_is_a_method_with_its_signature_and_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (environment,) = make(monkeypatch, FakeSession())
    public = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")]
    assert public == ["find", "reset"], "TRL takes every other method for a tool"
    assert str(inspect.signature(environment.find)) == "(*, name: str) -> str"
    assert inspect.getdoc(environment.find) == "Find an item.\n\nArgs:\n    name: Its name."


def test_the_policy_reads_the_task_and_the_output_and_no_prompt_of_fleetbus(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    _, (environment,) = make(monkeypatch, FakeSession(), session)
    assert environment.reset(task_key="u", prompt=[]) == "How many nails?"
    assert environment.find(name="nail") == "1"
    assert environment.find(size=3) == "2", "the environment says what is wrong with arguments"
    assert session.turns == [ToolCall(name="find", arguments={"name": "nail"}), ToolCall(name="find", arguments={"size": 3})]


def test_the_last_answer_is_a_turn_and_then_the_episode_is_graded_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(reward=0.5, unpaid=0.5)
    environments, made = make(monkeypatch, session)
    made[0].find(name="nail")
    assert environments.reward([say("7")], made, trainer_state=None) == [0.5]
    assert session.turns[1:] == ["7 <done>"]
    assert session.closed == 1


def test_calls_that_trl_did_not_execute_are_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession()
    environments, made = make(monkeypatch, session)
    made[0].find(name="nail")
    assert environments.reward([say("", tool_calls=[{}])], made) == [1.0]
    assert len(session.turns) == 1


def test_an_episode_that_is_over_frees_its_worker_and_answers_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(ends=1)
    environments, made = make(monkeypatch, session)
    made[0].find(name="nail")
    assert session.closed == 1
    assert made[0].find(name="nail") == OVER
    assert environments.reward([say("7")], made) == [1.0]
    assert len(session.turns) == 1


def test_an_environment_without_tools_is_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(tools=())
    environments, made = make(monkeypatch, session)
    assert made[0].say(text="50") == "Tool result:\n1"
    assert environments.reward([say("It is 51.")], made) == [1.0]
    assert session.turns == ["50", "It is 51."]


@pytest.mark.parametrize("fault", [{"fails": 1}, {"reward": None, "unpaid": None, "reason": "the grader is away"}])
def test_an_episode_that_fails_has_no_reward_and_leaves_the_others_theirs(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    failing = FakeSession(**fault)
    environments, made = make(monkeypatch, failing, FakeSession(), count=2)
    if "fails" in fault:
        for _ in range(2):
            with pytest.raises(EpisodeExcluded, match="the server is gone"):
                made[0].find(name="nail")
        assert len(failing.turns) == 1, "what is gone is not asked again"
    assert environments.reward([say("7"), say("7")], made) == [None, 1.0]
    assert made[0].failure
    assert environments.excluded == 1
    assert failing.closed == 1


def test_failures_alone_end_the_trainer_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.trainers.trl_environment.FAILED_IN_A_ROW", 2)
    environments, made = make(monkeypatch, FakeSession(fails=1), FakeSession(fails=1), count=2)
    with pytest.raises(RuntimeError, match=r"no episode of the last 2 was played: .*the server is gone"):
        environments.reward([say("7"), say("7")], made)


def test_failures_of_one_small_batch_after_another_end_the_trainer_unless_an_episode_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several processes each is given its own rows alone, which may be one."""
    monkeypatch.setattr("fleetbus_workers.trainers.trl_environment.FAILED_IN_A_ROW", 3)
    faults = [1, 1, 0, 1, 1, 1]
    environments, made = make(monkeypatch, *(FakeSession(fails=fault) for fault in faults), count=len(faults))
    for environment in made[:-1]:
        environments.reward([say("7")], [environment])
    with pytest.raises(RuntimeError, match="no episode of the last 3 was played"):
        environments.reward([say("7")], made[-1:])


def test_a_last_answer_that_cannot_be_sent_fails_its_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = EncodingSession()
    environments, made = make(monkeypatch, session, FakeSession(), count=2)
    assert environments.reward([say("\ud800"), say("7")], made) == [None, 1.0]
    assert "cannot be encoded" in made[0].failure
    assert session.closed == 1


@pytest.mark.parametrize("value", [10**30, "\ud800"])
def test_arguments_that_cannot_be_sent_are_a_mistake_of_the_policy_s(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    environments, (environment,) = make(monkeypatch, EncodingSession())
    with pytest.raises(ValueError, match="these arguments cannot be sent"):
        environment.find(name=value)
    assert environment.find(name="nail") == "1"
    assert environments.reward([say("7")], [environment]) == [1.0]


def test_no_worker_is_waited_for_once_two_calls_of_a_batch_were_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [SilentSession() for _ in range(5)]
    _, made = make(monkeypatch, *sessions, count=4)
    for environment in made:
        with pytest.raises(EpisodeUnanswered):
            environment.find(name="nail")
    assert [len(session.turns) for session in sessions[:4]] == [1, 1, 0, 0]
    made[0].reset(task_key="t")
    with pytest.raises(EpisodeUnanswered, match="no answer to step"):
        made[0].find(name="nail")


def test_episodes_that_nobody_graded_are_closed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for half a minute where the server is away."""
    MeetingSession.closing = 0
    environments, _ = make(monkeypatch, MeetingSession(), MeetingSession(), count=2)
    environments.close()
    assert MeetingSession.closing == 2


def test_an_episode_that_does_not_begin_is_begun_again_and_then_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [FakeSession(fails=-1) for _ in range(3)]
    environments, made = make(monkeypatch, sessions[0], FakeSession(), sessions[1], sessions[2], count=2)
    assert environments.reward([say("7"), say("7")], made) == [1.0, None]
    assert [session.closed for session in sessions] == [1, 1, 1]


def test_a_run_without_a_free_worker_ends_the_trainer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EpisodeUnanswered, match="no free slot; TRL begins a batch of episodes at once"):
        make(monkeypatch, AwaySession())


def test_an_episode_that_nobody_graded_is_closed_by_the_next_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeSession(), FakeSession()
    environments, made = make(monkeypatch, first, second)
    made[0].reset(task_key="t")
    assert first.closed == 1
    environments.close()
    assert second.closed == 1


def test_other_tools_than_those_that_trl_was_told_of_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = make(monkeypatch, FakeSession(), FakeSession(tools=(ToolSpec("sell"),)))
    with pytest.raises(UserError, match="task u has tools"):
        made[0].reset(task_key="u")
    with pytest.raises(UserError, match="no task_key"):
        made[0].reset(prompt=[])


def test_tasks_of_several_environment_keys_have_a_factory_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, FakeSession(), FakeSession(tools=(ToolSpec("sell"),)), envs=("shop", "market"))
    environments = FleetbusEnvironments(tasks=[])
    factories = environments.factory
    assert isinstance(factories, dict)
    made = {name: factory() for name, factory in factories.items()}
    assert hasattr(made["shop"], "find")
    assert hasattr(made["market"], "sell")
    assert not hasattr(made["shop"], "sell")
    assert environments.dataset["environment"] == ["shop", "market"]


def test_the_example_of_the_page_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards: list[float | None] = []

    class Trainer:
        """The calls of TRL's trainer, for one batch of two rows."""

        def __init__(self, model: str, reward: Any, args: Any, dataset: Any, *, environment_factory: Any) -> None:
            self._made = [environment_factory() for _ in dataset["task_key"]]
            self._reward, self._dataset = reward, dataset

        def train(self) -> None:
            for environment, prompt, key in zip(self._made, self._dataset["prompt"], self._dataset["task_key"], strict=True):
                assert environment.reset(prompt=prompt, task_key=key) == "How many nails?"
                assert environment.find(name="nail") == "1"
            rewards.extend(self._reward(prompts=[], completions=[say("7"), say("7")], environments=self._made))

    connect(monkeypatch, FakeSession(), FakeSession(), FakeSession(reward=0.5, unpaid=0.5))
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOTrainer=Trainer, GRPOConfig=lambda *_, **__: None))
    exec(shown("environment_factory="), {})
    assert rewards == [1.0, 0.5]


def test_a_start_that_trl_cannot_show_fails_that_episode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken, shown_image = FakeSession(), FakeSession()
    spoken.first = (TOLD[0], ChatMessage(role="assistant", content="Hello."))
    shown_image.first = (TOLD[0], ChatMessage(role="user", content=(Image(object="d" * 64),)))
    environments, made = make(monkeypatch, spoken, shown_image, FakeSession(), count=3)
    assert environments.reward([say("7")] * 3, made) == [None, None, 1.0]
    assert "role assistant" in made[0].failure
    assert "shows an image" in made[1].failure
    assert [spoken.closed, shown_image.closed] == [1, 1]


def test_tools_in_another_order_are_the_same_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    sell = ToolSpec("sell")
    _, (environment,) = make(monkeypatch, FakeSession(tools=(FIND, sell)), FakeSession(tools=(sell, FIND)))
    assert environment.reset(task_key="u") == "How many nails?"
