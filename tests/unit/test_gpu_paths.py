"""Faults that only a GPU would notice, checked by structure: tensors that cross processes, threads that choose a device, and
names of experts."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.inference.weight_folders import WeightFolders
from fleetbus_workers.learner.torch.checkpoint_files import start_writing
from fleetbus_workers.learner.torch.optimizer import build_optimizer, prepare_moments
from fleetbus_workers.learner.torch.sharding import Shards
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from fleetbus_workers.weights.file import WeightsRejected, write_weights
from tests.support.trainable_model import make_model, make_sequence
from tests.support.trainer_settings import trainer_settings


class OnGpu(torch.Tensor):
    """A tensor that is to be copied to the CPU before it is pickled."""

    def cpu(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(1)


def test_tensors_reach_other_processes_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled tensor of a GPU arrives on the sender's device number, the same for all."""
    sent: list[Any] = []

    def gather(found: list[Any], own: Any) -> None:
        sent.append(own)
        found[0] = own

    monkeypatch.setattr(dist, "all_gather_object", gather)
    shards = Shards.__new__(Shards)
    shards._mesh, shards.world = object(), 1  # type: ignore[assignment]
    shards.merge_across({0: torch.ones(1).as_subclass(OnGpu)})
    assert [type(tensor) for tensor in sent[0].values()] == [torch.Tensor]


def test_a_thread_chooses_the_device_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    Shards(torch.device("cuda:3"), None).enter_thread()
    assert chosen == [torch.device("cuda:3")]


@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_optimizer_counts_its_steps_where_its_kernel_reads_them(offload: bool) -> None:
    """The fused kernel of a GPU reads the count from the GPU's memory: an illegal access if it lies in the CPU's."""
    shards = Shards(torch.device("cpu"), None)
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = build_optimizer(
        [{"params": [parameter]}], trainer_settings(offload_optimizer=offload), shards, torch.device("cpu")
    )
    prepare_moments(optimizer)
    assert optimizer.state[parameter]["step"].device.type == ("cpu" if offload else "meta")


@pytest.mark.integration
def test_engines_are_spawned_and_asking_for_a_gpu_does_not_begin_cuda() -> None:
    """A forked engine ends with "Cannot re-initialize CUDA in forked subprocess" once its parent has asked CUDA anything."""
    code = (
        "import os; from fleetbus_workers.inference.vllm.engine import is_gpu_available; is_gpu_available(); "
        "print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'], os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert asked.stdout.split() == ["spawn", "1"]


def test_a_checkpoint_is_written_in_a_thread_on_the_device_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first GPU: every process would open a context there."""
    entered: list[str] = []
    monkeypatch.setattr(Shards, "enter_thread", lambda shards: entered.append(threading.current_thread().name))
    start_writing(tmp_path, {"weight": torch.ones(1)}, Shards(torch.device("cpu"), None))()
    assert [name.partition("_")[0] for name in entered] == ["checkpoint"]


def test_every_call_of_the_trainer_enters_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner and its followers call from worker threads, each of which begins on the first GPU."""
    trainer = TorchTrainer(make_model(tmp_path / "model"), settings=trainer_settings())
    entered: list[Shards] = []
    monkeypatch.setattr(Shards, "enter_thread", lambda shards: entered.append(shards))
    ids, mask = np.arange(3, 13).astype(np.int32), np.arange(10) >= 5
    batch = [make_sequence(0, ids, mask, logprobs=np.full(10, -4.0), advantage=1.0)]
    (tmp_path / "state").mkdir()
    calls = {
        "train": lambda: trainer.train(batch, version=3, progress=0.0),
        "compute_logprobs": lambda: trainer.compute_logprobs(batch),
        "save_weights": lambda: trainer.save_weights(tmp_path / "weights"),
        "save_model": lambda: trainer.save_model(tmp_path / "saved"),
        "start_checkpoint": lambda: trainer.start_checkpoint(tmp_path / "state")(),
        "restore": lambda: trainer.restore(tmp_path / "state"),
    }
    for name, call in calls.items():
        entered.clear()
        call()
        assert entered, name


def test_engines_take_experts_under_the_names_that_are_published_and_no_fused_ones(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "moe")
    trainer = TorchTrainer(folder, settings=trainer_settings())
    folders = WeightFolders(folder, tmp_path / "served")
    file = tmp_path / "weights.safetensors"

    def published(manifest: Any) -> PolicyPublished:
        return PolicyPublished(
            policy="default", version=1, lineage="l", step=1, uri=file.as_uri(), manifest=manifest, size_bytes=1
        )

    assert folders.prepare(published(trainer.save_weights(file))).is_dir()
    in_memory = dict(trainer._model.state_dict())
    assert any("gate_up_proj" in name for name in in_memory), "transformers keeps experts fused"
    with pytest.raises(WeightsRejected, match="lacks"):
        folders.prepare(published(write_weights(file, in_memory)))
