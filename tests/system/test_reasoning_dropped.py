"""A thinking model trained with ``inference.reasoning = template``: what is trained is what its template renders, id by id.

The model is built from nothing with Qwen3's own chat template, which drops the reasoning of earlier turns. Every turn's prompt
is rendered again here, by transformers alone, from the messages and texts in the log.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import (
    EpisodeSettings,
    EvaluationSettings,
    InferenceSettings,
    LearnerSettings,
    LimitSettings,
    NatsSettings,
    RunSettings,
)
from fleetbus.core.episode.segments import SegmentTree, pack_segment_ids
from fleetbus_schemas import Action, ChatMessage, Observation, SamplingSettings, Task, VersionSpan
from fleetbus_schemas.tokens import unpack_ids
from fleetbus_workers.environment.base import Start, Step, Verdict
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.scripted import StubSampler
from fleetbus_workers.inference.torch import TorchSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.starter.warm_start import build_model, fit
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.trainer_settings import trainer_settings

pytestmark = pytest.mark.integration

TEMPLATE = Path(__file__).parents[1] / "unit" / "chat_templates" / "qwen3.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ("red", "green", "blue", "bolt", "nut", "one", "two")
TURNS = ("user", "tool", "user", "tool", "user")
"""Who speaks before each turn: results of tools keep the reasoning in Qwen3's context, questions drop it."""


def build_folder(folder: Path) -> Path:
    """A model that thinks now and then, from random weights: a few seconds of imitation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(("user", "assistant", "tool_response", *WORDS))] * 9, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE.read_text()
    ).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    torch.set_num_threads(1)
    model = build_model(loaded, seed=1)
    fit(model, make_examples(loaded, 200), steps=40, batch_size=12, seed=1)
    model.save_pretrained(folder)
    return folder


def make_examples(tokenizer: Any, count: int) -> tuple[list[Any], list[Any]]:
    draw = random.Random(3)
    ids, masks = [], []
    for _ in range(count):
        question = [{"role": "user", "content": " ".join(draw.choices(WORDS, k=2))}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        thought = f"<think>\n{draw.choice(WORDS)}\n</think>\n\n" if draw.random() < 0.7 else ""
        said = f"{thought}{draw.choice(WORDS)}<|im_end|>"
        before, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, prompt + said))
        ids.append(np.array(whole, np.int32))
        masks.append(np.arange(len(whole)) >= len(before))
    return ids, masks


class Interview:
    """Five turns; the reward counts how often the policy said a colour."""

    replayable = True

    def __init__(self) -> None:
        self._said: list[str] = []

    async def open(self, task: Task) -> None:
        self._task = task

    async def reset(self) -> Start:
        return Start(messages=(self._ask(),))

    def _ask(self) -> ChatMessage:
        turn = len(self._said)
        return ChatMessage(role=TURNS[turn], content=f"{WORDS[(turn + (self._task.seed or 0)) % len(WORDS)]} {turn}")  # type: ignore[arg-type]

    async def step(self, action: Action) -> Step:
        self._said.append(action.text)
        return Step(terminated=True) if len(self._said) == len(TURNS) else Step(messages=(self._ask(),))

    async def state(self) -> dict[str, Any]:
        return {}

    async def verify(self) -> Verdict:
        await anyio.lowlevel.checkpoint()
        return Verdict(reward=sum(text.split("</think>")[-1].strip() in WORDS[:3] for text in self._said) / len(TURNS))

    async def close(self) -> None: ...


class RecordingTrainer(TorchTrainer):
    """Trains, and keeps what it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained: dict[str, list[TrainingSequence]] = {}
        self.largest_differences: list[float] = []

    def train(self, batch: Sequence[TrainingSequence], *, version: int, progress: float) -> dict[str, float]:
        for sequence in batch:
            self.trained.setdefault(sequence.episode_id, []).append(sequence)
        metrics = super().train(batch, version=version, progress=progress)
        self.largest_differences.append(metrics["logprob_difference_max"])
        return metrics


async def train(folder: Path, place: Path, steps: int) -> tuple[RecordingTrainer, list[Observation], list[Action]]:
    """A whole run in this process; what was trained, asked and answered."""
    configuration = build_configuration(
        run=RunSettings(name="small", folder=str(place)),
        nats=NatsSettings(lanes=4, max_bytes=1 << 29),
        episode=EpisodeSettings(max_tokens=16, max_turns=len(TURNS), max_episode_tokens=1500),
        inference=InferenceSettings(slots=64, max_model_len=1500, reasoning="template"),
        learner=LearnerSettings(steps=steps, groups=8, group_size=8, checkpoint_every=steps),
        evaluation=EvaluationSettings(episodes=0, greedy=False),
        limits=LimitSettings(),
    )
    configuration = msgspec.structs.replace(
        configuration, environment=msgspec.structs.replace(configuration.environment, slots=64)
    )
    for files in (run_folder(configuration.run).weights, run_folder(configuration.run).checkpoints):
        files.mkdir(parents=True)
    trainer = RecordingTrainer(folder, settings=trainer_settings(learning_rate=1e-4))
    tasks = [Task(key=f"t{number}", prompt="talk", seed=number) for number in range(40)]
    async with small_deployment(configuration, published=False) as fleet:
        fleet.environment("e0", make=Interview)
        fleet.inference(
            "i0", sampler=TorchSampler(folder, max_model_len=1500), template=ChatTemplate(folder, reasoning="template")
        )
        learner = fleet.learner("l0", trainer=trainer, curriculum=Curriculum(tasks, [], seed=1))
        await learner.ended.wait()
        assert learner.error is None
        return trainer, await fleet.observations(), await fleet.actions()


def check_trained(
    folder: Path, trainer: RecordingTrainer, observations: list[Observation], actions: list[Action]
) -> tuple[Counter[str], int]:
    """Every trained sequence against the template's own rendering; the reasons of segments, and how many sequences."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = {(each.episode_id, each.turn): each.messages for each in observations}
    answered = {(each.episode_id, each.turn): each for each in actions}
    reasons: Counter[str] = Counter()
    count = 0
    for episode, sequences in trainer.trained.items():
        conversation: list[dict[str, str]] = []
        expected: list[list[int]] = []
        sampled = 0
        for turn in range(len(TURNS)):
            if (episode, turn) not in answered:
                break
            action = answered[episode, turn]
            conversation += [{"role": each.role, "content": str(each.content)} for each in asked[episode, turn]]
            text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            said = list(unpack_ids(action.sampled))
            expected.append([*tokenizer.encode(text, add_special_tokens=False), *said])
            words = said[:-1] if said[-1] == tokenizer.eos_token_id else said
            conversation.append({"role": "assistant", "content": tokenizer.decode(words)})
            reasons[action.origin.reason if action.origin is not None else "continued" if turn else "first"] += 1
            sampled += len(said)
        trained = [sequence.ids.tolist() for sequence in sequences]
        assert all(ids in expected for ids in trained), f"{episode}: a trained sequence is not what the template renders"
        assert all(any(ids[: len(turn)] == turn for ids in trained) for turn in expected), f"{episode}: a turn is not trained"
        assert sum(int(sequence.loss_mask.sum()) for sequence in sequences) == sampled, f"{episode}: not trained once"
        count += len(trained)
    return reasons, count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("thinker"))


async def test_every_trained_sequence_is_what_the_template_renders(folder: Path, tmp_path: Path) -> None:
    with anyio.fail_after(300):
        trainer, observations, actions = await train(folder, tmp_path, steps=1)
    reasons, count = check_trained(folder, trainer, observations, actions)
    assert len(trainer.trained) == 64
    assert reasons["reasoning_dropped"] > 0
    assert reasons["continued"] > 0
    assert count > len(trainer.trained)
    assert max(trainer.largest_differences) < 1e-3


class Thinks(StubSampler):
    """Thinks before every answer, up to a turn at which it hangs."""

    def __init__(self, template: ChatTemplate, *, hangs_at: int = 99) -> None:
        self._template = template
        self._hangs_at = hangs_at

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.lowlevel.checkpoint()
        turn = self._template.decode(request.ids).count("<|im_start|>assistant") - 1
        if turn >= self._hangs_at:
            await anyio.sleep_forever()
        said = f"<think>\nthought {turn}\n</think>\n\nred" if turn != 1 else "<think>\n\n\nodd</think>blue"
        ids = [*self._template.encode(said), self._template.turn_end]
        versions = (VersionSpan(version=self.version, start=0, stop=len(ids)),)
        return Generation(ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", versions=versions)


async def test_a_worker_that_takes_over_renders_the_conversation_from_the_log(folder: Path) -> None:
    template = ChatTemplate(folder, reasoning="template")
    configuration = build_configuration(inference=InferenceSettings(slots=8, max_model_len=1500, reasoning="template"))
    async with small_deployment(configuration) as fleet:
        fleet.environment("e0", make=Interview)
        first = fleet.inference("i0", sampler=Thinks(template, hangs_at=2), template=template)
        await fleet.request(task=Task(key="t", prompt="talk", seed=0), sampling=SamplingSettings(max_tokens=64))
        async with fleet.bus.read([fleet.subjects.actions()]) as reader:
            for _ in range(2):
                await reader.receive()
        first.kill()
        fleet.inference("i1", sampler=Thinks(template), template=template)
        assert (await fleet.result()).outcome == "completed"
        actions, observations = await fleet.actions(), await fleet.observations()
    assert {action.worker for action in actions} == {"i0", "i1"}
    asked = {each.turn: each.messages for each in observations}
    tree, conversation = SegmentTree(), []
    for turn, action in enumerate(actions):
        segment = tree.append(action)
        conversation += [{"role": each.role, "content": str(each.content)} for each in asked[turn]]
        text = template._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        held = unpack_ids(pack_segment_ids(segment, actions[: turn + 1]))
        assert list(held) == [*template.encode(text), *unpack_ids(action.sampled)]
        conversation.append({"role": "assistant", "content": action.text})
    reasons = [action.origin.reason if action.origin is not None else "" for action in actions]
    assert reasons == ["", "", "reasoning_dropped", "", "reasoning_dropped"]


@pytest.mark.slow
async def test_every_trained_sequence_of_a_thousand_episodes_is_what_the_template_renders(folder: Path, tmp_path: Path) -> None:
    with anyio.fail_after(900):
        trainer, observations, actions = await train(folder, tmp_path, steps=16)
    reasons, count = check_trained(folder, trainer, observations, actions)
    print(f"{len(trainer.trained)} episodes, {count} sequences, turns: {dict(reasons)}, {max(trainer.largest_differences):.1e}")
    assert len(trainer.trained) >= 1000
    assert max(trainer.largest_differences) < 1e-3
