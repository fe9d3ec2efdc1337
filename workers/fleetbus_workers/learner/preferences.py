"""Direct preference optimization (arXiv 2305.18290) on whole episodes, with the torch trainer. Blocking.

The gradient of ``-log sigmoid(beta * h)``, where ``h`` is how much more the policy than the model it started from prefers the
chosen episode to the rejected one, is that of the two log-likelihoods with the weight ``beta * sigmoid(-beta * h)`` of either
sign. The weights are computed before each step, so that the trainer trains in its usual micro-batches, and the reference's
log-probabilities once, before the first: no second model is held.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus.config.settings import AlgorithmSettings
from fleetbus.core.algorithms.arrays import Array
from fleetbus.core.algorithms.objectives import Clip
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.fine_tuning import check_output, write_folder
from fleetbus_workers.learner.preference_pairs import Pair
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer

Floats = NDArray[np.float64]


def weigh_log_likelihood(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip: Clip) -> Array:
    """``-A log pi`` per token, in the form of an objective."""
    return -advantages * logprobs


def compute_preferences(
    chosen: Floats, rejected: Floats, chosen_before: Floats, rejected_before: Floats, *, beta: float
) -> tuple[Floats, Floats]:
    """Losses and weights, both [P], of pairs from the log-likelihoods of their episodes, now and by the reference."""
    margins = beta * ((chosen - chosen_before) - (rejected - rejected_before))
    losses = np.logaddexp(0.0, -margins)
    return losses, beta * np.exp(-np.logaddexp(0.0, margins))


def prefer(
    model: Path,
    pairs: Sequence[Pair],
    output: Path,
    *,
    settings: TorchTrainerSettings,
    beta: float,
    epochs: int,
    batch: int,
    seed: int,
    report: Callable[[int, int, float, float], None],
) -> None:
    """Train ``epochs`` passes over the pairs, shuffled, ``batch`` of them per step, and write the model's folder, which is
    there whole or not at all. ``report`` gets step, steps, the mean loss before the step, and the share of pairs whose chosen
    episode the policy prefers by more than the reference does. Raises `UserError` if ``output`` is not empty."""
    check_output(output)
    trainer = build_trainer(model, settings)
    before = [compute_likelihoods(trainer, [pair]) for pair in pairs]
    draw = np.random.default_rng(seed)
    steps, step = epochs * -(-len(pairs) // batch), 0
    for _ in range(epochs):
        order = draw.permutation(len(pairs))
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            reference = np.concatenate([before[place] for place in places], axis=1)
            loss, accuracy = take_step(trainer, [pairs[place] for place in places], reference, beta, step / steps)
            step += 1
            report(step, steps, loss, accuracy)
    write_folder(trainer, output)


def build_trainer(model: Path, settings: TorchTrainerSettings) -> TorchTrainer:
    """A trainer whose loss is the sum over the tokens of each leaf, divided by the number of leaves."""
    algorithm = AlgorithmSettings(reduction="sequence_sum", segment_weight="segment")
    settings = msgspec.structs.replace(settings, algorithm=algorithm)
    settings = msgspec.structs.replace(
        settings, learner=msgspec.structs.replace(settings.learner, minibatches=1, advantage_estimator="grpo"),
        trainer=msgspec.structs.replace(settings.trainer, epochs=1),
    )  # fmt: skip
    return TorchTrainer(model, settings=settings, objective=weigh_log_likelihood)


def compute_likelihoods(trainer: TorchTrainer, pairs: Sequence[Pair]) -> Floats:
    """Log-likelihoods of the sampled tokens of chosen and rejected episodes, [2, P]."""
    leaves = _flatten(pairs)
    sums = np.array([float(found.double().sum()) for found in trainer.compute_logprobs(leaves)])
    counts = [len(part) for pair in pairs for part in (pair.chosen, pair.rejected)]
    by_episode = [part.sum() for part in np.split(sums, list(accumulate(counts))[:-1])]
    return np.array(by_episode).reshape(len(pairs), 2).T


def take_step(
    trainer: TorchTrainer, pairs: Sequence[Pair], reference: Floats, beta: float, progress: float
) -> tuple[float, float]:
    """One optimizer step; the mean loss before it, and the share of pairs with a positive margin. ``reference`` [2, P]: what
    `compute_likelihoods` gave before the first."""
    chosen, rejected = compute_likelihoods(trainer, pairs)
    losses, weights = compute_preferences(chosen, rejected, *reference, beta=beta)
    leaves = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    batch = []
    for pair, weight in zip(pairs, weights * leaves / len(pairs), strict=True):
        batch += [_weigh(leaf, weight) for leaf in pair.chosen] + [_weigh(leaf, -weight) for leaf in pair.rejected]
    trainer.train(batch, version=-2, progress=progress)
    return float(losses.mean()), float((losses < np.log(2.0)).mean())


def _weigh(leaf: TrainingSequence, weight: float) -> TrainingSequence:
    return msgspec.structs.replace(leaf, advantages=np.where(leaf.loss_mask, weight, 0.0).astype(np.float32))


def _flatten(pairs: Sequence[Pair]) -> list[TrainingSequence]:
    return [leaf for pair in pairs for leaf in (*pair.chosen, *pair.rejected)]
