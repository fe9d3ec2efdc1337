"""A v1 taskset of verifiers on a run's environments, for prime-rl: its engines sample, environment workers play.

verifiers finds a taskset as an importable module; that of fleetbus is a file of two lines, say ``fleet_tasks.py``:

    from fleetbus_workers.trainers.prime_rl import FleetbusEnv, FleetbusHarness, FleetbusTaskset
    __all__ = ["FleetbusEnv", "FleetbusHarness", "FleetbusTaskset"]

    [orchestrator.train.source.env.taskset]  # prime-rl's configuration
    id = "fleet_tasks"
    url = "nats://host:4222"
    run = "r1"
    tasks = "/data/tasks.json"

Needs verifiers 0.4; the version that prime-rl pinned in August 2026 has the same classes, and was not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from fleetbus.tasks.files import load_tasks_by_key
from fleetbus_schemas import ChatMessage
from fleetbus_workers.trainers.sampled_episode import EpisodeSource
from fleetbus_workers.trainers.spoken_episode import EpisodeExcluded, SpokenEpisode, join_texts

RETRIES = 2

_END_OF_TURN = vf.ProgramResult(exit_code=0, stdout="", stderr="")


class FleetbusTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """``url``: empty for FLEETBUS_NATS_URL. ``tasks``: the file, for orchestrator and environment server alike. ``timeout``:
    seconds per call of an environment."""

    tasks: str
    url: str = ""
    run: str = "default"
    timeout: float = 600.0


class FleetbusTaskData(vf.TaskData):  # type: ignore[misc]
    """``task_key`` alone: the environment says what its policy sees."""

    task_key: str


class FleetbusTask(vf.Task[FleetbusTaskData]):  # type: ignore[misc]
    """No rewards of its own: `FleetbusEnv` records the environment's."""


class FleetbusTaskset(vf.Taskset[FleetbusTask, FleetbusTasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[FleetbusTask]:
        """The file's tasks in its order. Raises `UserError`."""
        for index, key in enumerate(load_tasks_by_key(self.config.tasks)):
            yield FleetbusTask(FleetbusTaskData(idx=index, name=key, task_key=key), self.config.task)


class FleetbusHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A turn is one call of the model in the server's own process: there is no program to start."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        """Let the policy speak after ``data.prompt``, the conversation so far. Raises `openai.OpenAIError`."""
        messages = [message_to_wire(message) for message in data.prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return _END_OF_TURN


class FleetbusEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """``agent``: its ``max_turns`` and ``max_total_tokens`` end an episode. ``retries``: how often an episode that fails
    is played again; after that prime-rl leaves it out of its group."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    retries: vf.RetryConfig = vf.RetryConfig(max_retries=RETRIES)


class FleetbusEnv(vf.Env[FleetbusEnvConfig]):  # type: ignore[misc]
    """An episode that the policy's bounds end has its verdict, too; one that failed has an error and no reward."""

    async def start(self) -> None:
        """Raises `UserError` for a file without tasks, and without a server's address."""
        given = self.config.taskset
        self._source = EpisodeSource.open(
            None, url=given.url, run=given.run, tasks=given.tasks, timeout=given.timeout, max_turns=2**31
        )

    async def run(self, task: Any, agents: Any) -> None:
        """One episode. Raises `EpisodeExcluded`, and `UserError` for an unknown key."""
        episode = self._source.speak(task.data.task_key)
        try:
            told = await episode.start()
            async with agents.agent.interaction(task) as interaction:
                await _converse(episode, interaction, told)
            if episode.reward is not None:
                interaction.trace.record_reward("fleetbus", episode.reward)
        finally:
            await episode.close()


async def _converse(episode: SpokenEpisode, interaction: Any, told: Sequence[ChatMessage]) -> None:
    while not episode.is_over:
        segment = await interaction.turn([{"role": message.role, "content": join_texts([message])} for message in told])
        if not segment.terminated:
            told = await episode.say(segment.messages[-1].content or "")
        elif interaction.trace.errors:
            return  # the policy's side failed, which its trace says
        elif not episode.turn_rewards:
            raise EpisodeExcluded(f"task {interaction.trace.task.data.task_key}: its prompt leaves the policy no turn")
        else:
            await episode.grade(interaction.trace.stop_condition or "length")
