"""The log of a run that learns, as messages of its roles, with numbers drawn as real runs have them; tests plant one fault."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from fleetbus.core.diagnosis.diagnose import diagnose
from fleetbus.core.diagnosis.findings import Diagnosis
from fleetbus.core.diagnosis.fold import DiagnosisFold
from fleetbus_schemas import (
    Action,
    ActionReference,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    Exclusion,
    LineageStarted,
    Message,
    Observation,
    Outcome,
    SamplingSettings,
    StepTrained,
    Subjects,
    Task,
    VersionSpan,
)
from fleetbus_schemas.tokens import pack_ids, pack_logprobs

SUBJECTS = Subjects("run")
GROUPS, SIZE, TASKS = 8, 8, 32
WORKERS, REPLICAS = ("environment-0", "environment-1", "environment-2"), ("inference-0", "inference-1", "inference-2")
WORDS = "one two red blue far near tall old new cold warm door wall tree lake hill road stone bread song".split()
SETTINGS: dict[str, dict[str, Any]] = {
    "episode": {"temperature": 1.0},
    "learner": {"max_staleness": 1, "max_grad_norm": 0.1, "learning_rate": 3e-4},
    "trainer": {"precision": "float32"},
}


class Played(msgspec.Struct, kw_only=True):
    """One episode before it is told to the log; a plant changes it."""

    step: int
    task: str
    worker: str
    replica: str
    length: int
    reward: float | None
    turns: int = 3
    outcome: Outcome = "completed"
    reason: str = ""
    prompt: tuple[int, ...] = (1, 2, 3)
    temperature: float = 1.0
    seconds: float = 1.0
    difference: float = 3e-8
    text: str = "x"


Plant = Callable[[Played, random.Random], None]
MetricsPlant = Callable[[int, dict[str, float]], None]


class DiagnosedRun:
    """``plant`` changes each episode, ``plant_metrics`` the metrics of each step."""

    def __init__(
        self, seed: int, *, steps: int = 24, plant: Plant | None = None, plant_metrics: MetricsPlant | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._steps = steps
        self._plant = plant or (lambda played, chance: None)
        self._plant_metrics = plant_metrics or (lambda step, metrics: None)
        self._texts = random.Random(f"texts of {seed}")
        self._hardness = [self._random.gauss(0, 0.5) for _ in range(TASKS)]
        self._groups = self._told = 0

    def messages(self) -> Iterator[Message]:
        """In the order of the log."""
        yield LineageStarted(lineage="l1", worker="learner", settings=SETTINGS)
        self._told = 1
        for step in range(1, self._steps + 1):
            episodes: dict[str, Played] = {}
            for _ in range(GROUPS):
                task = self._groups % TASKS
                for index in range(SIZE):
                    played = self._play(step, task)
                    episode = f"g{self._groups}-{index}"
                    yield from self._tell(episode, f"g{self._groups}", index, played)
                    self._told += 4
                    episodes[episode] = played
                self._groups += 1
            yield self._train(step, episodes)
            self._told += 1

    def diagnose(self) -> Diagnosis:
        """What is found in it."""
        fold = DiagnosisFold()
        for sequence, message in enumerate(self.messages(), start=1):
            fold.apply(message, sequence)
        return diagnose(fold.build())

    def _play(self, step: int, task: int) -> Played:
        chance, progress = self._random, (step - 1) / max(self._steps - 1, 1)
        skill = 1 / (1 + math.exp(-(-0.8 + 3 * progress + self._hardness[task])))
        turns = chance.choice((3, 3, 3, 4))
        played = Played(
            step=step,
            task=f"task-{task}",
            worker=chance.choice(WORKERS),
            replica=chance.choice(REPLICAS),
            length=max(8, round(chance.gauss(17 * turns, 4))),
            turns=turns,
            reward=float(chance.random() < skill),
            outcome="truncated" if chance.random() < 0.03 else "completed",
            prompt=(1, 2, 3, task),
            text=f"for task {task} we say " + " ".join(self._texts.choice(WORDS) for _ in range(40)),
        )
        if chance.random() < 0.01:
            played.outcome, played.reward, played.reason = "env_failed", None, "env_failed"
        self._plant(played, chance)
        return played

    def _tell(self, episode: str, group: str, index: int, played: Played) -> Iterator[Message]:
        """Request, first observation, one action with all tokens, result."""
        task = Task(key=played.task, prompt=played.task)
        yield EpisodeRequested(
            episode_id=episode, group_id=group, sample_index=index, split="train", task=task, policy="default",
            deadline_ns=1, sampling=SamplingSettings(temperature=played.temperature),
        )  # fmt: skip
        yield Observation(
            episode_id=episode, attempt=1, turn=0, policy="default", tokens_left=99, environment_lane="e0", deadline_ns=1,
            messages=(ChatMessage(role="user", content=played.task),),
        )  # fmt: skip
        entropy = self._find_entropy(played.step)
        logprobs = [-self._random.expovariate(1 / entropy) for _ in range(played.length)]
        yield Action(
            episode_id=episode, attempt=1, turn=0, text=played.text, prompt_delta=pack_ids(played.prompt),
            sampled=pack_ids(range(played.length)), logprobs=pack_logprobs(logprobs), worker=played.replica,
            versions=(VersionSpan(version=played.step - 1, start=0, stop=played.length),),
        )  # fmt: skip
        yield EpisodeFinished(
            episode_id=episode, group_id=group, attempt=1, outcome=played.outcome, worker=played.worker,
            task_key=played.task, reward=played.reward, turns=played.turns, tokens=played.length + 50,
            actions=(ActionReference(sequence=self._told + 3, lane="e0", turn=0),), timings={"step": played.seconds},
        )  # fmt: skip

    def _find_entropy(self, step: int) -> float:
        return 0.07 * math.exp(-1.3 * step / self._steps)

    def _train(self, step: int, episodes: dict[str, Played]) -> StepTrained:
        chance, trained = self._random, {name: each for name, each in episodes.items() if not each.reason}
        rewards = [each.reward for each in trained.values() if each.reward is not None]
        metrics = {
            "reward": math.fsum(rewards) / max(len(rewards), 1),
            "entropy": self._find_entropy(step) * math.exp(chance.gauss(0, 0.05)),
            "logprob_difference_mean": 3e-8 * math.exp(chance.gauss(0, 0.5)),
            "logprob_slope": 1.0,
            "staleness_mean": 1.0,
            "kl": abs(chance.gauss(0, 5e-4)),
            "grad_norm": 0.15 * math.exp(chance.gauss(0, 0.6)),
            "learning_rate": 3e-4 * min(1.0, step / 10),
            "seconds_wait": 4.0 * math.exp(chance.gauss(0, 0.2)),
            "seconds_read": 0.2,
            "seconds_train": 2.0 * math.exp(chance.gauss(0, 0.1)),
        }
        self._plant_metrics(step, metrics)
        return StepTrained(
            lineage="l1",
            step=step,
            version=step,
            episodes=tuple(trained),
            excluded=tuple(Exclusion(episode_id=name, reason=each.reason) for name, each in episodes.items() if each.reason),
            metrics=metrics,
            differences=tuple(each.difference * math.exp(chance.gauss(0, 0.3)) for each in trained.values()),
        )


def find_subject(message: Message) -> str:
    match message:
        case LineageStarted() | StepTrained():
            return SUBJECTS.train("default")
        case EpisodeRequested():
            return SUBJECTS.task("default", message.episode_id)
        case Observation():
            return SUBJECTS.observation("default", "any", message.episode_id)
        case Action():
            return SUBJECTS.action("e0", message.episode_id)
    return SUBJECTS.episode(message.episode_id)  # type: ignore[attr-defined]


TOLERANCE = 2
"""Steps."""


def expect(found: Diagnosis, kind: str, step: int) -> None:
    """Assert that a finding of this kind is there, with the step at which it began."""
    named = {each.kind: each for each in found.findings}
    assert kind in named, f"{kind} is not among {sorted(named)}"
    finding = named[kind]
    assert abs(finding.step - step) <= TOLERANCE, f"step {finding.step} instead of {step}"
    assert finding.size.low <= finding.size.value <= finding.size.high
    assert finding.evidence
    assert finding.advice.endswith(".")
