"""Episodes on a run's environments whose policy another trainer samples with servers of its own: ids in, ids out.

    source = EpisodeSource.open(tokenizer, url="nats://host:4222", run="r1", tasks="tasks.json", max_turns=8)
    episode = await source.play("task-1", sample)  # sample(ids) -> sampled ids, their log-probabilities

An environment worker that is killed costs nothing: another one takes the session over. Callers may be on loops and
in threads of their own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec
import structlog

from fleetbus.client.blocking import SharedClient, get_shared_client
from fleetbus.core.algorithms.reward_components import MAX_ABS_REWARD
from fleetbus.errors import UserError
from fleetbus.tasks.files import build_tasks, load_tasks_by_key
from fleetbus_schemas import ChatMessage, Task
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded, SpokenEpisode

if TYPE_CHECKING:
    from fleetbus_workers.inference.chat_template import ChatTemplate

log = structlog.get_logger()

LONG_TEXT = 8192
"""Characters of messages that take milliseconds to become ids."""

Sample = Callable[[list[int]], Awaitable[tuple[Sequence[int], Sequence[float] | None]]]
Tasks = str | os.PathLike[str] | Iterable[Task | Mapping[str, object]]


class EpisodeSource(msgspec.Struct, frozen=True, kw_only=True):
    """A run's environments, tasks by key, and bounds of an episode: ``max_turns``, ``max_tokens`` after the prompt, and
    ``max_context``, the longest that the policy is sampled after.
    ``timeout``: seconds per call of an environment. ``retries``: how often an episode that fails is played again.
    ``max_abs_reward``: no reward is larger, as workers have it too (`environment.max_abs_reward`)."""

    client: SharedClient
    tasks: Mapping[str, Task]
    template: ChatTemplate | None = None
    max_turns: int = 50
    max_tokens: int | None = None
    max_context: int | None = None
    timeout: float = 600.0
    retries: int = 2
    max_abs_reward: float = MAX_ABS_REWARD

    @classmethod
    def open(cls, tokenizer: Any, *, url: str = "", run: str = "default", tasks: Tasks, **bounds: Any) -> EpisodeSource:
        """Open for a tokenizer of transformers, or for None where only texts are exchanged. Without ``url`` that of
        FLEETBUS_NATS_URL counts. Raises `UserError`."""
        if not (url := url or os.environ.get("FLEETBUS_NATS_URL", "")):
            raise UserError("no server is known: give nats://HOST:4222, or set FLEETBUS_NATS_URL")
        if isinstance(tasks, str | os.PathLike):
            named = load_tasks_by_key(tasks)
        else:
            named = {task.key: task for task in build_tasks(tasks)}
        template = None if tokenizer is None else open_template(tokenizer)
        return cls(client=get_shared_client(url, run), tasks=named, template=template, **bounds)

    def episode(self, key: str) -> SampledEpisode:
        """An episode of a task that has not begun. Raises `UserError` for an unknown key."""
        return SampledEpisode(self, self.find_task(key))

    def speak(self, key: str) -> SpokenEpisode:
        """The same in texts. Raises `UserError` for an unknown key."""
        return SpokenEpisode(self, self.find_task(key))

    def find_task(self, key: str) -> Task:
        """The task of this key. Raises `UserError`."""
        if key not in self.tasks:
            raise UserError(f"there is no task {key!r}; the first is {next(iter(self.tasks), '')!r}")
        return self.tasks[key]

    async def play(self, key: str, sample: Sample) -> SampledEpisode:
        """One episode from its first turn to its verdict; the environment is told no more than what is in the row, which ends
        at ``max_tokens``. Raises `EpisodeExcluded` when it has failed each time."""
        for further in reversed(range(1 + self.retries)):
            episode = self.episode(key)
            try:
                await episode.begin()
                while not episode.is_over:
                    ids, logprobs = await sample(episode.ids)
                    left = None if self.max_tokens is None else self.max_tokens - len(episode.response_ids)
                    await episode.step(ids[:left], logprobs if logprobs is None else logprobs[:left])
                return episode
            except EpisodeExcluded as excluded:
                if not further:
                    raise
                log.warning("episode failed; playing another", task=key, reason=str(excluded))
            finally:
                await episode.close()
        raise AssertionError("unreachable")


class SampledEpisode(SpokenEpisode):
    """The same in ids. ``ids``: what the policy is sampled after; ``response_mask``: 1 for sampled ids; ``response_logprobs``:
    0.0 elsewhere."""

    def __init__(self, source: EpisodeSource, task: Task) -> None:
        super().__init__(source, task)
        if source.template is None:
            raise UserError("episodes in ids need a tokenizer: give EpisodeSource.open that of the policy")
        self.template = source.template
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    async def begin(self) -> list[int]:
        """The ids of the prompt. Raises `EpisodeExcluded`."""
        messages = await self.start()
        self.prompt_ids = await _encode(messages, partial(self.template.encode_prompt, messages, ()))
        return self.prompt_ids

    async def step(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """One turn of these sampled ids. Raises `EpisodeExcluded`, and `ValueError` for log-probabilities of others."""
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(ids)} ids were sampled with {len(logprobs)} log-probabilities")
        self._append(ids, 1, logprobs)
        messages = await self.say(self.template.decode_text(ids))
        if self.is_over:
            return
        following = await _encode(messages, partial(self.template.encode_continuation, ids, messages))
        source, length = self._source, len(self.response_ids) + len(following)
        is_long = source.max_context is not None and len(self.prompt_ids) + length > source.max_context
        if is_long or (source.max_tokens is not None and length >= source.max_tokens):
            await self.grade("length")
        else:
            self._append(following, 0)

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float] | None = None) -> None:
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.response_logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


async def _encode(messages: Sequence[ChatMessage], encode: Callable[[], list[int]]) -> list[int]:
    """Long messages in a thread: all episodes of a batch share the trainer's event loop."""
    texts = [message.content for message in messages]
    length = sum(len(text) if isinstance(text, str) else LONG_TEXT for text in texts)
    return await anyio.to_thread.run_sync(encode) if length >= LONG_TEXT else encode()


@lru_cache(maxsize=8)
def open_template(tokenizer: Any) -> ChatTemplate:
    """Its chat template, as it is in memory: trainers replace it by one of their settings. Raises `UserError`."""
    from fleetbus_workers.inference.chat_template import ChatTemplate  # texts alone need none of its packages

    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: set its chat_template, or take an instruction model's")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return ChatTemplate(Path(folder))
