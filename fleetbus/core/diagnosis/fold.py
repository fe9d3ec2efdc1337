"""Folds the entries of a log into the facts of a diagnosis. Pure; memory follows the number of training episodes.

Actions are counted when the result of their episode names them: those of attempts that were superseded say nothing. A log whose
Actions were trimmed lacks what they say, and no more.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

from fleetbus.core.diagnosis.facts import EpisodeFacts, PromptFacts, RunFacts, StepFacts, StepPhrases
from fleetbus.core.diagnosis.phrases import PhraseFold, Spoken
from fleetbus.core.training.evaluation_summary import SUCCESS, is_success
from fleetbus.core.training.lineage import compute_surviving_steps, is_surviving
from fleetbus_schemas import (
    Action,
    EpisodeFinished,
    EpisodeRequested,
    LineageStarted,
    Message,
    Observation,
    SamplingSettings,
    StepTrained,
)
from fleetbus_schemas.episode import DISTORTING
from fleetbus_schemas.tokens import unpack_logprobs

MAX_PROMPTS = 4096
"""Different first prompts that are held against each other."""


LARGEST = 1e50
"""Larger numbers than this are taken to be none: a worker may write any, and their squares have no sum."""


class _Said(msgspec.Struct):
    """One Action until its episode ends."""

    worker: str
    sampled: int
    surprise: float


class DiagnosisFold:
    """Takes the messages of a log in its order, each with its place there and its time."""

    def __init__(self) -> None:
        self._lineages: list[LineageStarted] = []
        self._steps: list[StepTrained] = []
        self._times: dict[tuple[str, int], int] = {}
        self._episodes: dict[str, EpisodeFacts] = {}
        self._asked: dict[str, SamplingSettings] = {}
        self._said: dict[str, dict[int, _Said]] = {}
        self._shown: dict[str, bytes] = {}
        self._prompts: dict[bytes, PromptFacts] = {}
        self._phrases = PhraseFold()
        self._phrases_of: dict[tuple[str, int], StepPhrases] = {}

    def apply(self, message: Message, sequence: int, time_ns: int = 0) -> None:
        """Take one entry; messages that say nothing here are ignored."""
        match message:
            case EpisodeRequested(split="train"):
                self._asked[message.episode_id] = message.sampling
            case Observation(turn=0) if message.episode_id in self._asked and not message.segment:
                self._shown[message.episode_id] = hash_prompt(message)
                self._phrases.add_prompt(self._shown[message.episode_id], message.messages)
            case Action() if message.episode_id in self._asked:
                self._add_action(message, sequence)
            case EpisodeFinished(split="train"):
                self._add_result(message)
            case LineageStarted():
                self._lineages.append(message)
            case StepTrained():
                self._steps.append(message)
                self._times[message.lineage, message.step] = time_ns
                self._phrases_of[message.lineage, message.step] = self._phrases.fold_step(self._list_spoken(message))

    def build(self) -> RunFacts:
        """The facts as of now. Steps that a later lineage went back behind do not count."""
        surviving = compute_surviving_steps(self._lineages)
        steps = {each.step: each for each in self._steps if is_surviving(surviving, each.lineage, each.step)}
        settings = self._lineages[-1].settings if self._lineages else {}
        asked = _read_sampling(settings.get("episode", {}))
        for episode, sampling in self._asked.items():
            if asked is not None and episode in self._episodes:
                self._episodes[episode].is_off_settings = _read_shape(sampling) != asked
        built = [self._build_step(steps[number]) for number in sorted(steps)]
        return RunFacts(steps=built, settings=settings, prompts=list(self._prompts.values()))

    def _build_step(self, step: StepTrained) -> StepFacts:
        trained = [self._episodes[each] for each in step.episodes if each in self._episodes]
        for each in trained:
            each.reason, each.trained_reward = "", _bound(step.rewards.get(each.episode_id))
        excluded = [self._episodes[each.episode_id] for each in step.excluded if each.episode_id in self._episodes]
        reasons = {each.episode_id: each.reason for each in step.excluded}
        for each in excluded:
            each.reason = reasons[each.episode_id]
        measured = zip(step.episodes, step.differences, strict=False)
        differences = {episode: size for episode, size in measured if 0 <= size <= LARGEST}
        phrases = self._phrases_of[step.lineage, step.step]
        metrics = {name: value if abs(value) <= LARGEST else math.nan for name, value in step.metrics.items()}
        return StepFacts(
            step=step.step, time_ns=self._times[step.lineage, step.step], metrics=metrics, trained=trained,
            excluded=excluded, differences=differences, phrases=phrases,
        )  # fmt: skip

    def _list_spoken(self, step: StepTrained) -> list[Spoken]:
        known = [self._episodes[each] for each in step.episodes if each in self._episodes]
        return [
            Spoken(episode_id=each.episode_id, group_id=each.group_id, task=each.task, reward=each.reward)
            for each in known
            if each.reward is not None
        ]

    def _add_action(self, action: Action, sequence: int) -> None:
        self._phrases.add_text(action.episode_id, action.text)
        logprobs = unpack_logprobs(action.logprobs[: len(action.logprobs) // 4 * 4])
        surprise = -math.fsum(each for each in logprobs if math.isfinite(each))
        said = self._said.setdefault(action.episode_id, {})
        said[sequence] = _Said(action.worker, len(logprobs), surprise)
        prompt = self._shown.pop(action.episode_id, None) if action.turn == 0 else None
        if prompt is None or not action.prompt_delta or (len(self._prompts) >= MAX_PROMPTS and prompt not in self._prompts):
            return
        digest = hashlib.blake2b(action.prompt_delta, digest_size=16).digest()
        rendered = self._prompts.setdefault(prompt, PromptFacts()).rendered.setdefault(action.worker, {})
        rendered.setdefault(digest, []).append(action.episode_id)

    def _add_result(self, result: EpisodeFinished) -> None:
        said = self._said.pop(result.episode_id, {})
        self._shown.pop(result.episode_id, None)
        if result.episode_id in self._episodes:
            return
        facts = EpisodeFacts(
            episode_id=result.episode_id, group_id=result.group_id, task=result.task_key, worker=result.worker,
            outcome=result.outcome, reward=_bound(result.reward),
            is_success=result.reward is not None and is_success(result, SUCCESS),
            turns=result.turns, tokens=result.tokens, seconds=_bound(sum(result.timings.values())) or 0.0,
        )  # fmt: skip
        for reference in result.actions:
            if (each := said.get(reference.sequence)) is not None:
                facts.sampled += each.sampled
                facts.surprise += each.surprise
                facts.replicas[each.worker] = facts.replicas.get(each.worker, 0) + each.sampled
        for each in said.values():
            if not each.sampled:  # a failed Action is named by no result
                facts.replicas.setdefault(each.worker, 0)
        self._episodes[result.episode_id] = facts


def _bound(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= LARGEST else None


def hash_prompt(observation: Observation) -> bytes:
    """The digest of a first prompt: its messages and tools, as they are before any template."""
    content = msgspec.msgpack.encode((observation.messages, observation.tools))
    return hashlib.blake2b(content, digest_size=16).digest()


def _read_shape(sampling: SamplingSettings) -> tuple[object, ...]:
    """The settings that make a distribution: the temperature, and those that distort it."""
    return (sampling.temperature, *(getattr(sampling, name) for name in DISTORTING))


def _read_sampling(table: dict[str, bool | int | float | str]) -> tuple[object, ...] | None:
    """The settings to be sampled with in training: the run's temperature, and nothing that distorts; None if unknown."""
    if "temperature" not in table:
        return None
    return (table["temperature"], *_read_shape(SamplingSettings())[1:])
