"""Builds a starter policy for an environment of somebody's own: it imitates random play there, rewarded play more often.

`guessing_player` plays the tasks; a small model that has learned to copy imitates it. What comes out writes calls and answers
that the environment accepts and is right now and then, so that training has something to select from.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.core.text.prompts import TOOL_RESULT, build_compact_system_prompt
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, Task, ToolSpec
from fleetbus_workers.environment.base import TaskEnvironmentFactory
from fleetbus_workers.environment.check.episode import PlayedEpisode, play_episode
from fleetbus_workers.starter.build import BATCH_SIZE, build_reporter, save_model, tokenize, train_copying
from fleetbus_workers.starter.conversation import Conversation
from fleetbus_workers.starter.guessing_player import build_guessing_player
from fleetbus_workers.starter.tokenizer import render, train_tokenizer
from fleetbus_workers.starter.warm_start import build_model, fit

AT_A_TIME = 16
TOKENIZER_EPISODES = 500
REWARDED_SHARE = 1 / 3
"""Of the episodes that are imitated; the others keep what else may be tried."""

IMITATED = 4000
MOST_TOKENS = 1024


class EnvironmentStarterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result. ``episodes`` were graded, ``rewarded`` of them above their mean; ``reward`` is that mean."""

    parameters: int
    vocabulary: int
    episodes: int
    rewarded: int
    reward: float


class EnvironmentStarterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of each stage."""

    episodes: int = 2000
    copy_steps: int = 400
    imitation_steps: int = 350


async def play_guesses(
    factory: Any, tasks: Sequence[Task], configuration: Configuration, *, episodes: int, seed: int
) -> list[tuple[Conversation, float]]:
    """Conversations of random play and their rewards, in the order of the tasks, which are gone round. Raises `UserError` if
    the environment fails."""
    played: list[PlayedEpisode | None] = [None] * episodes
    failures: list[str] = []
    limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def play(number: int) -> None:
        task = tasks[number % len(tasks)]
        make = partial(factory.for_task, task) if isinstance(factory, TaskEnvironmentFactory) else factory
        player = build_guessing_player(seed * episodes + number)
        async with limiter:
            found = await play_episode(make, task, player, configuration, turns=configuration.episode.max_turns)
        failure = next((problem for problem in found.problems if problem.is_failure), None)
        if failure is not None:
            where = f" ({failure.location})" if failure.location else ""
            failures.append(f"task {task.key}: {failure.text}{where}: `fleetbus check` shows more")
            group.cancel_scope.cancel()
        played[number] = found

    async with anyio.create_task_group() as group:
        for number in range(episodes):
            group.start_soon(play, number)
    if failures:
        raise UserError(failures[0])
    graded = [found for found in played if found is not None and found.verdict is not None and found.verdict.reward is not None]
    return [(_read_conversation(found), found.verdict.reward) for found in graded]  # type: ignore[union-attr,misc]


def _read_conversation(episode: PlayedEpisode) -> Conversation:
    messages: list[ChatMessage] = []
    for exchange in episode.exchanges:
        if not all(isinstance(message.content, str) for message in exchange.messages):
            raise UserError("the environment shows images: `fleetbus starter --vision` builds a model that sees")
        shown = [_render_result(message) for message in exchange.messages]
        messages += [*shown, ChatMessage(role="assistant", content=exchange.said)]
    if episode.rendered_tools:
        messages = _render_tools(messages, episode.rendered_tools)
    return Conversation(messages=tuple(messages), success=False)


def _render_result(message: ChatMessage) -> ChatMessage:
    """A tool's result as `CHAT_TEMPLATE` shows it to the policy."""
    if message.role != "tool":
        return message
    text = str(message.content)
    return ChatMessage(role="user", content=text if text.startswith("Error") else f"{TOOL_RESULT}{text}")


def _render_tools(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[ChatMessage]:
    """The conversation with its tools where `CHAT_TEMPLATE` describes them: in the system message."""
    described, rest = build_compact_system_prompt(tools), list(messages)
    if rest and rest[0].role == "system":
        described = f"{rest.pop(0).content}\n{described}"
    return [ChatMessage(role="system", content=described), *rest]


def choose_imitated(played: Sequence[tuple[Conversation, float]], *, seed: int) -> list[Conversation]:
    """`IMITATED` conversations: of those above the mean reward `REWARDED_SHARE`, as often as it takes, and of the others the
    rest; of all alike if none is better than another."""
    mean = sum(reward for _, reward in played) / len(played)
    better = [conversation for conversation, reward in played if reward > mean]
    others = [conversation for conversation, reward in played if reward <= mean]
    draw = random.Random(seed)
    if not better:
        return draw.choices(others, k=IMITATED)
    share = max(REWARDED_SHARE, len(better) / len(played))
    return [draw.choice(better if draw.random() < share else others) for _ in range(IMITATED)]


def build_environment_starter(
    folder: Path,
    played: Sequence[tuple[Conversation, float]],
    *,
    seed: int = 0,
    report: Callable[[str], None],
    settings: EnvironmentStarterSettings | None = None,
) -> EnvironmentStarterReport:
    """Write a policy that imitates ``played`` to ``folder`` as a transformers model, in minutes, on as many threads as torch is
    set to: on a model this small more than one gain nothing. Raises `UserError` if nothing was played that a small model can
    read, `OSError` when the folder cannot be written."""
    settings = settings or EnvironmentStarterSettings()
    if not played:
        raise UserError("no episode was graded: nothing can be learned from them")
    if len({reward for _, reward in played}) == 1:
        raise UserError(
            f"{len(played)} random episodes all had the reward {played[0][1]:g}: no signal to begin with; pay partial rewards, "
            "make tasks easier, or give a pretrained model one worked example in its prompt (`fleetbus up --model smollm2`)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((render(each.messages) for each, _ in played[:TOKENIZER_EPISODES]), whole_words=True)
    mean = sum(reward for _, reward in played) / len(played)
    rewarded = sum(reward > mean for _, reward in played)
    report(f"played {len(played)} episodes, mean reward {mean:.3f}; tokenizer: {len(tokenizer)} tokens")
    ids, masks = tokenize(tokenizer, choose_imitated(played, seed=seed))
    short = [index for index, each in enumerate(ids) if len(each) <= MOST_TOKENS]
    if not short:
        raise UserError(f"all episodes are longer than {MOST_TOKENS} tokens: a small model reads no such prompts")
    model = build_model(tokenizer, seed=seed)
    train_copying(model, len(tokenizer), seed, settings.copy_steps, report)
    fit(
        model,
        ([ids[index] for index in short], [masks[index] for index in short]),
        steps=settings.imitation_steps,
        batch_size=BATCH_SIZE,
        seed=seed,
        after_step=build_reporter("imitating the play", settings.imitation_steps, report),
    )
    save_model(model, tokenizer, folder)
    return EnvironmentStarterReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=len(tokenizer),
        episodes=len(played),
        rewarded=rewarded,
        reward=mean,
    )
