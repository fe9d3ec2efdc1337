"""Builds the starter policy from nothing: a tokenizer, a model that learns to copy, then to imitate an erring expert.

The result plays the default task well enough to be rewarded now and then, and badly enough to have something to learn.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fleetbus_workers.environment.adapters.warehouse.items import Warehouse, draw_warehouse
from fleetbus_workers.starter.conversation import Conversation, play_many
from fleetbus_workers.starter.local_rollout import compute_success_rate, run_rollouts
from fleetbus_workers.starter.tokenizer import CONTROL_TOKENS, encode_with_mask, render, train_tokenizer
from fleetbus_workers.starter.warm_start import Sequences, build_model, fit, generate_copy_sequences

CONVERSATIONS = 4000
TOKENIZER_CONVERSATIONS = 500
COPY_STEPS = 500
COPIED_LOSS = 0.6
"""Copy training ends early once the mean negative log-likelihood of a predictable token is below this."""

IMITATION_STEPS = 350
BATCH_SIZE = 32
TEST_EPISODES = 256
TEST_SEED = 1 << 29
"""Warehouses to measure on: above those of the expert, below the held-out tasks."""


class StarterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result: parameters and tokens of the model, and the share of test episodes it solves sampled and greedily."""

    parameters: int
    vocabulary: int
    copy_steps: int
    sampled_success: float
    greedy_success: float


class StarterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of each stage; the defaults make the policy that is shipped."""

    conversations: int = CONVERSATIONS
    copy_steps: int = COPY_STEPS
    imitation_steps: int = IMITATION_STEPS
    test_episodes: int = TEST_EPISODES


def find_starter_folder() -> Path:
    """The model folder of the starter policy that comes with this package."""
    return Path(str(files("fleetbus_workers.starter"))) / "policy"


def build_starter(
    folder: Path, *, seed: int = 0, report: Callable[[str], None], settings: StarterSettings | None = None
) -> StarterReport:
    """Build a starter policy and write it to ``folder`` as a transformers model; takes minutes on one thread.

    The same seed and number of threads give the same files on the same machine. ``report`` gets a line every few seconds.
    Raises `OSError` when the folder cannot be written.
    """
    settings = settings or StarterSettings()
    folder.mkdir(parents=True, exist_ok=True)
    conversations = play_many(settings.conversations, seed=seed)
    tokenizer = train_tokenizer(render(played.messages) for played in conversations[:TOKENIZER_CONVERSATIONS])
    report(f"tokenizer: {len(tokenizer)} tokens")
    model = build_model(tokenizer, seed=seed)
    copy_steps = train_copying(model, len(tokenizer), seed, settings.copy_steps, report)
    fit(
        model,
        tokenize(tokenizer, conversations),
        steps=settings.imitation_steps,
        batch_size=BATCH_SIZE,
        seed=seed,
        after_step=build_reporter("imitating the expert", settings.imitation_steps, report),
    )
    warehouses = [draw_warehouse(TEST_SEED + index) for index in range(settings.test_episodes)]
    result = _evaluate(model, tokenizer, warehouses, copy_steps)
    save_model(model, tokenizer, folder)
    report(f"solves {result.sampled_success:.1%} of the test episodes sampled, {result.greedy_success:.1%} greedily")
    return result


def train_copying(model: PreTrainedModel, tokens: int, seed: int, steps: int, report: Callable[[str], None]) -> int:
    """Train on random tokens that repeat; returns the steps done."""
    show = build_reporter("learning to copy", steps, report)

    def stop_when_copied(step: int, loss: float) -> bool:
        show(step, loss)
        return loss < COPIED_LOSS

    sequences = generate_copy_sequences(steps * BATCH_SIZE, vocabulary=range(len(CONTROL_TOKENS), tokens), seed=seed)
    return fit(model, sequences, steps=steps, batch_size=BATCH_SIZE, seed=seed, decayed_to=1.0, after_step=stop_when_copied)


def build_reporter(what: str, steps: int, report: Callable[[str], None]) -> Callable[[int, float], bool]:
    """Build the function that `fit` calls after each step, to report every 20 steps how far it is."""

    def after_step(step: int, loss: float) -> bool:
        if step % 20 == 0 or step == steps:
            report(f"{what}: step {step} of {steps}, loss {loss:.3f}")
        return False

    return after_step


def tokenize(tokenizer: Any, conversations: Sequence[Conversation]) -> Sequences:
    """Token ids and masks of what the policy said, one array each per conversation."""
    encoded = [encode_with_mask(tokenizer, played.messages) for played in conversations]
    return [np.array(ids, np.int32) for ids, _ in encoded], [np.array(mask, np.bool_) for _, mask in encoded]


def _evaluate(model: PreTrainedModel, tokenizer: Any, warehouses: list[Warehouse], copy_steps: int) -> StarterReport:
    return StarterReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=len(tokenizer),
        copy_steps=copy_steps,
        sampled_success=compute_success_rate(run_rollouts(model, tokenizer, warehouses, seed=0)),
        greedy_success=compute_success_rate(run_rollouts(model, tokenizer, warehouses, seed=0, temperature=0.0)),
    )


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads and that samples at temperature 1."""
    # Made from the tokenizer, because the configuration's own defaults (greedy, no pad token) are not what a policy needs.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
