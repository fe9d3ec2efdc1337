"""A learner in a process of its own that publishes versions of a small model for a vLLM engine, and ends itself, stops or lies
at a named point of the last transfer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import structlog
import torch
from safetensors.torch import load_file

from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings, WeightsSettings
from fleetbus_schemas import Subjects, TensorEntry
from fleetbus_workers.learner.publication import Publication
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.weights.collective import group, sender
from fleetbus_workers.weights.file import WritingWatcher, write_weights
from tests.support.transfer_roles import die, die_after, transferring

RUN = "vllmtransfers"
SUBJECTS = Subjects(RUN)
CONFIGURATION = Configuration(
    run=RunSettings(name=RUN),
    inference=InferenceSettings(engine="vllm", slots=2),
    weights=WeightsSettings(transfer="collective", transfer_seconds=60.0),
)
HEARD_SECONDS = 300.0
HOLD_SECONDS = 60.0


def make_tied_model(folder: Path) -> Path:
    """A random Qwen3 of 34 MB, five pieces of a transfer, whose head is its embedding."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.support.vllm_engine import STARTER

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in STARTER.glob("tokenizer*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


class MovingTrainer(ScriptedTrainer):
    """Version n is the model with each tensor moved by n times a noise of its own; version 0 is the model."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.watcher: WritingWatcher | None = None
        self.version = 0
        self._tensors = load_file(model / "model.safetensors")

    def save_weights(self, file: Path) -> tuple[TensorEntry, ...]:
        generator = torch.Generator().manual_seed(self.version)
        moved = {
            name: tensor + (0.01 * torch.randn(tensor.shape, generator=generator) if self.version else 0.0)
            for name, tensor in self._tensors.items()
        }
        return write_weights(file, moved, self.watcher)


def act_at_piece(number: int, act: Callable[[torch.Tensor], None]) -> None:
    """The size is sent first. ``act`` gets the piece that is about to be sent."""
    plain, count = group.Group.broadcast, [-1]

    def broadcast(self: group.Group, content: torch.Tensor) -> Callable[[], None]:
        if count[0] == number:
            act(content)
        count[0] += 1
        return plain(self, content)

    group.Group.broadcast = broadcast  # type: ignore[method-assign]


def flip_a_bit(piece: torch.Tensor) -> None:
    piece[len(piece) // 2] ^= 1


def set_up(point: str, out: Path) -> None:
    """For the version that comes next."""

    def hold(piece: torch.Tensor) -> None:
        (out / "held").touch()
        ends = time.monotonic() + HOLD_SECONDS
        while not (out / "go").exists() and time.monotonic() < ends:
            time.sleep(0.01)

    name, _, number = point.partition(" at piece ")
    acts: dict[str, Callable[[torch.Tensor], None]] = {"dies": lambda _: die(), "holds": hold, "lies": flip_a_bit}
    points: dict[str, tuple[Any, str]] = {
        "dies when it has sent": (sender, "send_version"),
        "dies when it has written": (MovingTrainer, "save_weights"),
        "dies when it has announced": (Publication, "publish"),
    }
    if point in points:
        die_after(*points[point])
    elif point:
        act_at_piece(int(number), acts[name])


def run_learner(url: str, model: Path, out: Path, lineage: int, versions: int, point: str) -> None:
    """A new lineage that publishes so many versions, the last of them with ``point``."""
    warnings.simplefilter("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    torch.set_num_threads(1)
    anyio.run(publish_all, MovingTrainer(model), url, out, lineage, versions, point)


async def publish_all(trainer: MovingTrainer, url: str, out: Path, lineage: int, versions: int, point: str) -> None:
    heard = transferring(trainer, url, out, lineage, CONFIGURATION, engines=1, seconds=HEARD_SECONDS)
    async with heard as (publication, made):
        for number in range(versions):
            if number == versions - 1:
                set_up(point, out)
            trainer.version = publication.version + 1
            await publication.publish(number)
            await made._ended.wait()
