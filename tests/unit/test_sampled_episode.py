"""Episodes whose policy another trainer samples: their rows, their bounds, and failures, which are never a reward."""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from fleetbus.client.blocking import SharedClient
from fleetbus.client.sessions import SessionFailed
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, SessionAnswer, Task
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.scripted import STOP, ScriptedTemplate
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded

TURNS = 3


class FakeSession:
    """``TURNS`` turns of reward ``paid``, and a verdict of 1 beyond them; ``fails``: the step that the environment fails at."""

    def __init__(self, fails: int | None = None, unpaid: float | None = 1.0, paid: float = 0.25) -> None:
        self._fails, self._unpaid, self._paid = fails, unpaid, paid
        self.texts: list[str] = []
        self.closed = 0
        self.shown = ""

    async def request(self, kind: str, task: Task) -> SessionAnswer:
        return answer()

    async def reset(self) -> SessionAnswer:
        return answer(messages=(ChatMessage(role="user", content=self.shown or "go"),))

    async def step(self, text: str) -> SessionAnswer:
        self.texts.append(text)
        if len(self.texts) == self._fails:
            raise SessionFailed(answer(end="failed", error="the browser is gone"))
        told = (ChatMessage(role="user", content=self.shown or f"{len(self.texts)}"),)
        return answer(messages=told, reward=self._paid, terminated=len(self.texts) == TURNS)

    async def verify(self) -> SessionAnswer:
        return answer(reward=self._unpaid, unpaid=self._unpaid, reason="the grader is away")

    async def close(self) -> None:
        self.closed += 1


class FakeClient:
    """Hands out the given sessions, one after another."""

    def __init__(self, *sessions: FakeSession) -> None:
        self.sessions = list(sessions)
        self.given: list[FakeSession] = []

    def session(self, *, timeout: float) -> FakeSession:
        self.given.append(self.sessions.pop(0))
        return self.given[-1]

    async def wait(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await function(*args)


def answer(**fields: Any) -> SessionAnswer:
    return SessionAnswer(session="s", key="0", **fields)


def open_source(*sessions: FakeSession, **bounds: Any) -> tuple[EpisodeSource, FakeClient]:
    client = FakeClient(*sessions)
    source = EpisodeSource(
        template=cast("ChatTemplate", ScriptedTemplate()),
        client=cast("SharedClient", client),
        tasks={"t": Task(key="t")},
        **bounds,
    )
    return source, client


async def sample(ids: Sequence[int]) -> tuple[list[int], list[float]]:
    return [7, STOP], [-0.5, -0.25]


async def test_a_row_has_each_sampled_id_and_each_of_the_environment_with_its_mask() -> None:
    source, _ = open_source(FakeSession())
    episode = await source.play("t", sample)
    assert bytes(episode.prompt_ids) == b"go"
    assert episode.response_ids == [7, STOP, ord("1"), 7, STOP, ord("2"), 7, STOP]
    assert episode.response_mask == [1, 1, 0, 1, 1, 0, 1, 1]
    assert episode.response_logprobs == [-0.5, -0.25, 0.0, -0.5, -0.25, 0.0, -0.5, -0.25]


async def test_the_last_turn_has_what_the_verdict_gives_beyond_the_steps() -> None:
    source, _ = open_source(FakeSession())
    episode = await source.play("t", sample)
    assert (episode.turn_rewards, episode.reward, episode.stop_reason) == ([0.25, 0.25, 1.25], 1.75, "completed")


@pytest.mark.parametrize(
    ("bounds", "reason"), [({"max_turns": 2}, "max_turns"), ({"max_tokens": 6}, "length"), ({"max_context": 7}, "length")]
)
async def test_an_episode_that_its_bounds_end_is_graded_and_ends_with_the_policys_own_words(
    bounds: dict[str, int], reason: str
) -> None:
    source, client = open_source(FakeSession(), **bounds)
    episode = await source.play("t", sample)
    assert (episode.reward, episode.stop_reason, len(episode.turn_rewards)) == (1.5, reason, 2)
    assert episode.response_mask[-1] == 1
    assert client.given[0].closed == 1


class ThreadedTemplate(ScriptedTemplate):
    """Notes in which thread messages become ids."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def encode_prompt(self, *arguments: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode_prompt(*arguments)

    def encode_continuation(self, *arguments: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode_continuation(*arguments)


@pytest.mark.parametrize("is_long", [False, True])
async def test_long_messages_become_ids_beside_the_trainers_event_loop(is_long: bool) -> None:
    """A prompt of 30,000 tokens takes 50 ms, and a batch has thousands of episodes on one loop."""
    session = FakeSession()
    session.shown = "x" * (200_000 if is_long else 20)
    source, _ = open_source(session)
    template = ThreadedTemplate()
    source = msgspec.structs.replace(source, template=cast("ChatTemplate", template))
    episode = await source.play("t", sample)
    assert bytes(episode.prompt_ids) == session.shown.encode()
    assert {thread == threading.get_ident() for thread in template.threads} == {not is_long}


async def test_an_episode_whose_environment_fails_is_played_again_from_the_start() -> None:
    source, client = open_source(FakeSession(fails=2), FakeSession())
    episode = await source.play("t", sample)
    assert episode.reward == 1.75 and len(episode.response_ids) == 8
    assert [session.closed for session in client.given] == [1, 1]


async def test_an_episode_that_fails_each_time_has_no_reward_but_a_reason() -> None:
    source, client = open_source(FakeSession(fails=1), FakeSession(fails=1), retries=1)
    with pytest.raises(EpisodeExcluded, match="the browser is gone"):
        await source.play("t", sample)
    assert [session.closed for session in client.given] == [1, 1]


async def test_an_episode_without_a_verdict_is_excluded_with_the_graders_reason() -> None:
    source, _ = open_source(FakeSession(unpaid=None), retries=0)
    with pytest.raises(EpisodeExcluded, match="no verdict: the grader is away"):
        await source.play("t", sample)


@pytest.mark.parametrize("hostile", [1e308, -1e7, math.inf, math.nan])
@pytest.mark.parametrize("paid", [False, True])
async def test_an_episode_whose_reward_is_out_of_bounds_is_excluded(hostile: float, paid: bool) -> None:
    """By a worker that does not check its own: with it a whole batch of the trainer would be NaN."""
    source, client = open_source(FakeSession(paid=hostile) if paid else FakeSession(unpaid=hostile), retries=0)
    with pytest.raises(EpisodeExcluded, match=r"task t was rewarded .*: reward_"):
        await source.play("t", sample)
    assert client.given[0].closed == 1


async def test_no_worker_is_asked_to_close_what_never_began_or_is_closed() -> None:
    source, client = open_source(FakeSession(), FakeSession())
    await source.episode("t").close()
    begun = source.episode("t")
    await begun.begin()
    await begun.close()
    await begun.close()
    assert [session.closed for session in client.given] == [0, 1]


async def test_a_task_that_is_not_there_is_named() -> None:
    source, _ = open_source()
    with pytest.raises(UserError, match="no task 'u'; the first is 't'"):
        await source.play("u", sample)


def test_ids_without_a_tokenizer_and_a_tokenizer_without_a_template_are_refused_in_one_line() -> None:
    source, _ = open_source(FakeSession())
    with pytest.raises(UserError, match="episodes in ids need a tokenizer"):
        msgspec.structs.replace(source, template=None).episode("t")
    with pytest.raises(UserError, match=r"^the tokenizer has no chat template: set its chat_template"):
        EpisodeSource.open(Mock(chat_template=None), url="nats://127.0.0.1:1", tasks=[Task(key="t")])


async def test_what_is_sampled_beyond_the_row_is_not_told_to_the_environment() -> None:
    source, client = open_source(FakeSession(), max_tokens=5)

    async def sample_three(ids: Sequence[int]) -> tuple[list[int], list[float]]:
        return [ord("a"), ord("b"), STOP], [-0.5] * 3

    episode = await source.play("t", sample_three)
    assert client.given[0].texts == [f"97 98 {STOP}", "97"]
    assert episode.response_mask == [1, 1, 1, 0, 1] and len(episode.response_logprobs) == 5
    assert (episode.reward, episode.stop_reason) == (1.5, "length")


async def test_log_probabilities_that_are_not_those_of_the_ids_are_refused() -> None:
    async def sample_without_the_end(ids: Sequence[int]) -> tuple[list[int], list[float]]:
        return [7, STOP], [-0.5]

    source, client = open_source(FakeSession())
    with pytest.raises(ValueError, match="2 ids were sampled with 1 log-prob"):
        await source.play("t", sample_without_the_end)
    assert client.given[0].closed == 1
