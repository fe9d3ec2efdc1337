"""Faults that are planted into real training runs at a known step, each with the finding of `fleetbus diagnose` that names it.

Above it is `benchmarks.diagnose_plants`, which trains and reads the runs; below it are the torch engine, the torch trainer and
the warehouse environment, whose classes are changed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import torch

from fleetbus_schemas import Action, PolicyPublished, Task
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks
from fleetbus_workers.environment.base import Environment, Start, Step, Verdict
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.learner.torch.trainer import TorchTrainer

PLANTED_VERSION = 8
"""From this version on a fault is there: its tokens are trained in the step after."""


class Plant:
    """A healthy run. Subclasses plant one fault; ``kind`` is the finding that is to name it, at ``step``."""

    kind = ""
    step = PLANTED_VERSION + 1
    learner: ClassVar[dict[str, Any]] = {}
    replicas = 1
    tasks, steps = 40, 18

    def __init__(self, seed: int) -> None:
        self.version = 0
        self.seed = seed
        self._loaded = anyio.Event()

    @property
    def is_on(self) -> bool:
        return self.version >= PLANTED_VERSION

    def set_version(self, version: int) -> None:
        """Say which one an engine loads."""
        self.version = version
        self._loaded.set()
        self._loaded = anyio.Event()

    async def wait_for_version(self, version: int) -> None:
        while self.version < version:
            await self._loaded.wait()

    def make_tasks(self) -> list[Task]:
        return build_train_tasks(self.tasks, seed=self.seed)

    def make_sampler(self, folder: Path) -> TorchSampler:
        return PlantedSampler(self, folder, slots=48, max_model_len=1024)

    def make_template(self, folder: Path, replica: int) -> ChatTemplate:
        return ChatTemplate(folder)

    async def change_verdict(self, verdict: Verdict, task: Task, tokens: int) -> Verdict:
        """The verdict of an episode that sampled this many tokens."""
        return verdict

    def choose_weights(self, policy: PolicyPublished) -> PolicyPublished:
        """The weights that the engine loads."""
        return policy

    def change_request(self, request: GenerationRequest) -> GenerationRequest:
        return request

    def change_trainer(self, trainer: TorchTrainer) -> None:
        """Called when a version is loaded."""


class PlantedSampler(TorchSampler):
    def __init__(self, plant: Plant, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self._plant = plant

    async def load(self, policy: PolicyPublished) -> None:
        self._plant.set_version(policy.version)
        await super().load(self._plant.choose_weights(policy))

    async def generate(self, request: GenerationRequest) -> Generation:
        return await super().generate(self._plant.change_request(request))


class OldWeights(Plant):
    """The engine says that it has each version, and keeps the one before the plant."""

    kind = "old_weights"
    learner: ClassVar[dict[str, Any]] = {"max_staleness": 0}  # every step measures all of its tokens
    _kept: PolicyPublished | None = None

    def choose_weights(self, policy: PolicyPublished) -> PolicyPublished:
        if not self.is_on or self._kept is None:
            self._kept = policy
        return msgspec.structs.replace(self._kept, version=policy.version)


class Bfloat16(Plant):
    """The engine computes in bfloat16, the trainer in float32, from the start."""

    kind, step = "engine_mismatch", 1
    learner: ClassVar[dict[str, Any]] = {"max_staleness": 0}

    def make_sampler(self, folder: Path) -> TorchSampler:
        return PlantedSampler(self, folder, slots=48, max_model_len=1024, dtype=torch.bfloat16)


class Temperature(Plant):
    """The engine samples at temperature 1.5 instead of the request's, and gives log-probabilities under it."""

    kind = "wrong_temperature"
    learner: ClassVar[dict[str, Any]] = {"max_staleness": 0}

    def change_request(self, request: GenerationRequest) -> GenerationRequest:
        if not self.is_on:
            return request
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, temperature=1.5))


class Template(Plant):
    """The second of two replicas has another chat template."""

    kind, replicas = "prompt_differs", 2

    def make_template(self, folder: Path, replica: int) -> ChatTemplate:
        return OtherTemplate(self, folder) if replica else ChatTemplate(folder)


class OtherTemplate(ChatTemplate):
    def __init__(self, plant: Plant, folder: Path) -> None:
        super().__init__(folder)
        self._plant = plant

    def encode_prompt(self, messages: Any, tools: Any) -> list[int]:
        found: list[int] = super().encode_prompt(messages, tools)
        return [*found[:1], *found] if self._plant.is_on else found


class RewardsLength(Plant):
    """The verifier gives what an episode has in tokens, in part."""

    kind = "reward_follows_length"

    async def change_verdict(self, verdict: Verdict, task: Task, tokens: int) -> Verdict:
        return Verdict(reward=min(tokens / 100, 1.0)) if self.is_on and verdict.reward is not None else verdict


class PlantedEnvironment:
    """An environment that counts tokens, and whose verdicts are the plant's."""

    def __init__(self, plant: Plant, inner: Environment) -> None:
        self._plant, self._inner = plant, inner
        self._tokens = 0
        self._task = Task(key="")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open(self, task: Task) -> None:
        self._task = task
        await self._inner.open(task)

    async def reset(self) -> Start:
        return await self._inner.reset()

    async def step(self, action: Action) -> Step:
        self._tokens += count_tokens(action.sampled)
        return await self._inner.step(action)

    async def verify(self) -> Verdict:
        return await self._plant.change_verdict(await self._inner.verify(), self._task, self._tokens)


class SlowTasks(Plant):
    """A quarter of the tasks take so many versions to grade that their groups are stale, and dropped: the first of them when
    its grading has ended. They come in every other two steps, and fewer than five such steps prove nothing."""

    kind, steps = "tasks_dropped", 26
    learner: ClassVar[dict[str, Any]] = {"stale_groups": "drop", "max_staleness": 2}
    delay_versions = 4
    step = PLANTED_VERSION + delay_versions
    limit_seconds = 100.0  # less than limits.verify

    async def change_verdict(self, verdict: Verdict, task: Task, tokens: int) -> Verdict:
        if self.is_on and verdict.reward is not None and int(task.key.rpartition("-")[2]) % 4 == 0:
            with anyio.move_on_after(self.limit_seconds):
                await self.wait_for_version(self.version + self.delay_versions)
        return verdict


class LearningRate(Plant):
    """The learning rate of the optimizer is 100 times that of the settings."""

    kind = "exploding_update"

    def change_trainer(self, trainer: TorchTrainer) -> None:
        if self.is_on and trainer.settings.learner.learning_rate < 1e-2:
            learner = trainer.settings.learner
            changed = msgspec.structs.replace(learner, learning_rate=100 * learner.learning_rate)
            trainer.settings = msgspec.structs.replace(trainer.settings, learner=changed)


class Unsolvable(Plant):
    """Of the tasks 60 % ask for one thing and grade another. Each is to be tried 80 times: fewer prove nothing yet."""

    kind, step = "unsolvable_tasks", 1
    tasks, steps = 16, 30

    def make_tasks(self) -> list[Task]:
        tasks = super().make_tasks()
        count = len(tasks) * 6 // 10
        return [msgspec.structs.replace(task, config={"unsolvable": True}) for task in tasks[:count]] + tasks[count:]

    async def change_verdict(self, verdict: Verdict, task: Task, tokens: int) -> Verdict:
        return Verdict(reward=0.0) if task.config.get("unsolvable") else verdict


PLANTS: dict[str, type[Plant]] = {
    "old_weights": OldWeights,
    "bfloat16": Bfloat16,
    "temperature": Temperature,
    "template": Template,
    "rewards_length": RewardsLength,
    "slow_tasks": SlowTasks,
    "learning_rate": LearningRate,
    "unsolvable": Unsolvable,
}
