"""The digest of what a trainer was given of an episode, as `StepTrained` carries it.

It is made in two parts, so that an audit keeps 16 bytes instead of an episode's tokens until it knows the advantages.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetbus_workers.learner.base import Trainer, TrainingSequence


def train_with_digests(
    trainer: Trainer, sequences: Sequence[TrainingSequence], *, version: int, progress: float
) -> tuple[dict[str, bytes], dict[str, float]]:
    """`digest_sequences` of what the trainer is given, and the metrics that it returns. Blocking."""
    return digest_sequences(sequences), trainer.train(sequences, version=version, progress=progress)


def digest_sequences(sequences: Iterable[TrainingSequence]) -> dict[str, bytes]:
    """By episode the BLAKE2b-128 of what is trained of it. Blocking: it reads every array."""
    leaves: dict[str, list[bytes]] = {}
    for each in sequences:
        leaves.setdefault(each.episode_id, []).append(add_advantages(digest_sampled(each), each.advantages))
    return {episode: join_leaves(digests) for episode, digests in leaves.items()}


def join_leaves(digests: Sequence[bytes]) -> bytes:
    """The digest of an episode from those of its leaves: that of its only one, else the digest of them all in order."""
    return digests[0] if len(digests) == 1 else hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def digest_sampled(sequence: TrainingSequence) -> bytes:
    """Of a sequence all but its advantages: arrays of T tokens as little-endian ``i4`` ids, one byte of mask per token, ``f4``
    log-probabilities and ``i4`` versions, after T itself."""
    digest = hashlib.blake2b(len(sequence.ids).to_bytes(8, "little"), digest_size=16)
    digest.update(sequence.ids.astype("<i4").tobytes())
    digest.update(sequence.loss_mask.astype("u1").tobytes())
    digest.update(sequence.logprobs.astype("<f4").tobytes())
    digest.update(sequence.versions.astype("<i4").tobytes())
    return digest.digest()


def add_advantages(sampled: bytes, advantages: NDArray[np.float32]) -> bytes:
    """The whole digest: that of `digest_sampled`, followed by T advantages as ``f4``."""
    return hashlib.blake2b(sampled + advantages.astype("<f4").tobytes(), digest_size=16).digest()
