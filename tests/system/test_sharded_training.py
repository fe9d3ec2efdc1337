"""Two processes that share one model under torchrun train what one process trains."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer
from tests.support.servers import connect, run_server
from tests.support.trainable_model import make_model
from tests.support.trainer_settings import trainer_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[1] / "support/sharded_training.py"
LIMIT_SECONDS = 300


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("sharded_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), spread=0.0)


def sharded(folder: Path, out: Path, settings: TorchTrainerSettings, processes: int = 2) -> list[dict[str, float]]:
    """What several processes measured."""
    out.mkdir(exist_ok=True)
    (out / "settings.json").write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, str(folder), str(out)], env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, float]] = json.loads((out / "metrics.json").read_text())
    return found


def alone(folder: Path, out: Path, settings: TorchTrainerSettings) -> list[dict[str, float]]:
    out.mkdir(exist_ok=True)
    load_script().train(TorchTrainer(folder, settings=settings), out)
    found: list[dict[str, float]] = json.loads((out / "metrics.json").read_text())
    return found


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "ratio_mean", "ratio_max", "logprob_difference_max", "tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
        for name in ("value_loss", "explained_variance", "value_mean", "return_mean"):
            assert (name in ours) == (name in theirs), name
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-4, abs=1e-5), name


def assert_close(first: Path, second: Path) -> None:
    ours, theirs = load_file(first), load_file(second)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=2e-5, rtol=1e-4)


def assert_same_tokens(first: Path, second: Path) -> None:
    """Log-probability, gradient and clip of each token of each sequence, step by step."""
    ours, theirs = json.loads(first.read_text()), json.loads(second.read_text())
    assert [len(step) for step in ours] == [len(step) for step in theirs] and all(ours)
    for step, expected in zip(ours, theirs, strict=True):
        for found, known in zip(step, expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(known), atol=2e-5, rtol=1e-4)


CHOICES = {
    "plain": trainer_settings(micro_batch_size=2),
    "packed, recomputed, corrected, several updates": trainer_settings(
        packing=True, token_budget=60, gradient_checkpointing=True, rollout_correction="tis", minibatches=2
    ),
    "optimizer on the CPU": trainer_settings(micro_batch_size=2, offload_optimizer=True, minibatches=2),
    "with a critic": trainer_settings(micro_batch_size=2, advantage_estimator="gae", gae_lambda=0.9, minibatches=2),
}


@pytest.mark.parametrize("name", CHOICES)
def test_two_processes_measure_and_make_what_one_does(folder: Path, tmp_path: Path, name: str) -> None:
    settings = CHOICES[name]

    expected = alone(folder, tmp_path / "one", settings)
    found = sharded(folder, tmp_path / "two", settings)

    assert_same(found, expected)
    assert_close(tmp_path / "two/weights", tmp_path / "one/weights")
    assert_same_tokens(tmp_path / "two/tokens.json", tmp_path / "one/tokens.json")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two/model").state_dict()
    for tensor_name, tensor in load_file(tmp_path / "two/weights").items():
        assert torch.equal(loaded[tensor_name], tensor)


@pytest.mark.parametrize("name", ["plain", "optimizer on the CPU", "with a critic"])
def test_a_checkpoint_of_one_process_is_gone_on_from_by_two_and_the_other_way_round(
    folder: Path, tmp_path: Path, name: str
) -> None:
    settings = CHOICES[name]
    expected = alone(folder, tmp_path / "one", settings)
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one/checkpoint", tmp_path / "two/resume")

    found = sharded(folder, tmp_path / "two", settings)

    assert_same(found, expected[2:])
    shutil.rmtree(tmp_path / "two/resume")
    sharded(folder, tmp_path / "two", settings)
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "two/checkpoint", tmp_path / "again/resume")
    assert_same(alone(folder, tmp_path / "again", settings), expected[2:])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe"])
def test_losses_and_published_weights_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, kind: str, processes: int
) -> None:
    """Seven sequences and six experts divide by neither number: some processes hold fewer rows, or none."""
    model = make_model(tmp_path / "model", kind, spread=0.0)
    settings = trainer_settings(micro_batch_size=2)

    expected = alone(model, tmp_path / "one", settings)
    found = sharded(model, tmp_path / "several", settings, processes)

    assert_same(found, expected)
    assert_close(tmp_path / "several/weights", tmp_path / "one/weights")
    assert set(load_file(tmp_path / "one/weights")) == set(load_file(model / "model.safetensors")), "names of the files"


def test_a_checkpoint_of_four_processes_is_resumed_by_two_and_by_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "moe", spread=0.0)
    settings = trainer_settings(micro_batch_size=2)
    straight = sharded(model, tmp_path / "four", settings, 4)

    for processes in (2, 1):
        out = tmp_path / f"resumed-{processes}"
        shutil.copytree(tmp_path / "four/checkpoint", out / "resume")
        resumed = sharded(model, out, settings, processes) if processes > 1 else alone(model, out, settings)

        assert_same(resumed, straight[2:])
        assert_close(out / "weights", tmp_path / "four/weights")


def test_two_copies_of_a_model_on_two_processes_each_make_what_one_process_does(tmp_path: Path) -> None:
    """Also with the optimizer on the CPU, and from a checkpoint of theirs one process goes on."""
    model = make_model(tmp_path / "model", "moe", spread=0.0)
    settings = trainer_settings(micro_batch_size=2, shard_processes=2, offload_optimizer=True)

    expected = alone(model, tmp_path / "one", settings)
    found = sharded(model, tmp_path / "four", settings, 4)

    assert_same(found, expected)
    assert_close(tmp_path / "four/weights", tmp_path / "one/weights")
    shutil.copytree(tmp_path / "four/checkpoint", tmp_path / "again/resume")
    assert_same(alone(model, tmp_path / "again", settings), expected[2:])


def test_copies_that_do_not_divide_the_processes_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", spread=0.0)
    with pytest.raises(AssertionError, match=r"trainer\.shard_processes = 3 does not divide the learner's 4 processes"):
        sharded(model, tmp_path / "four", trainer_settings(shard_processes=3), 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServerProcess]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(run_server(tmp_path / "nats")) as server:
        with portal.wrap_async_context_manager(connect(server.url, run="sharded", role="init", worker="i")):
            pass  # the server's accounts have the run now
        yield server


def test_a_learner_under_torchrun_trains_a_fleet_to_its_end(tmp_path: Path, server: NatsServerProcess) -> None:
    """Two processes share the starter policy; only the first of them is an actor on the bus."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    program, options = [sys.executable, "-m", "fleetbus_workers.cli"], {"env": environment, "cwd": tmp_path}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    steps = ["--steps", "2", "--learner-groups", "2", "--learner-group-size", "4", "--evaluation-episodes", "0"]
    common = ["--nats", server.url, "--run", "sharded"]
    run = partial(subprocess.run, check=True, timeout=LIMIT_SECONDS, **options)
    run([*program, "init", *common])
    workers = [subprocess.Popen([*program, role, *common], **options) for role in ("environment", "inference")]  # type: ignore[call-overload]
    try:
        run([*torchrun, "fleetbus_workers.cli", "learner", *common, *steps])
        run([*program, "audit", "sharded", "--nats", server.url])
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / ".fleetbus/runs/sharded/model")


def test_adapters_of_a_sharded_model_are_those_of_a_whole_one(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = trainer_settings(micro_batch_size=2, lora_rank=2, learning_rate=1e-3)

    expected = alone(folder, tmp_path / "one", settings)
    found = sharded(folder, tmp_path / "two", settings)

    assert_same(found, expected)
    assert_close(tmp_path / "two/weights", tmp_path / "one/weights")


def test_adapters_of_copies_that_are_sharded_each_are_refused_where_peft_makes_them_of_a_shards_size(
    folder: Path, tmp_path: Path
) -> None:
    """Up to 0.20 it makes them whole."""
    pytest.importorskip("peft")
    if Version(version("peft")) < Version("0.21"):
        pytest.skip("adapters are whole")
    with pytest.raises(AssertionError, match=r"adapters of a shard's size: leave trainer\.shard_processes out"):
        sharded(folder, tmp_path / "four", trainer_settings(shard_processes=2, lora_rank=2), 4)
