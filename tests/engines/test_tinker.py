"""Sampling and training through the official SDK on a real Tinker-compatible server: `just test-tinker`.

The environment of these tests needs the SDK and skyrl's server (see tests/engines/tinker_server.py); shapes are kept the same
wherever possible, because the server compiles for every new one.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from fleetbus.config.settings import LearnerSettings, TinkerSettings
from fleetbus.errors import UserError
from fleetbus_schemas import PolicyPublished, SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest, RequestRefused
from fleetbus_workers.inference.tinker import TinkerSampler
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.checkpoints import STATE
from fleetbus_workers.learner.tinker import TinkerTrainer
from fleetbus_workers.tinker_service import open_service_client
from fleetbus_workers.weights.file import WeightsRejected
from tests.support.checkpoints import store

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("tinker", "skyrl")), reason="needs a server: just test-tinker"
    ),
]

STARTER = Path(__file__).parents[2] / "workers/fleetbus_workers/starter/policy"
START_SECONDS = 900
STOP = 2
LENGTH, PROMPT = 32, 16
LEARNING = LearnerSettings(learning_rate=1e-3, warmup_steps=0, min_lr_ratio=1.0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerSettings]:
    folder = tmp_path_factory.mktemp("tinker")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = '{"max_lora_adapters":8,"max_lora_rank":8,"train_micro_batch_size":4,"sample_max_num_sequences":8}'
    cache = Path(os.environ.get("FLEETBUS_JAX_CACHE", folder / "jax"))
    command = [
        sys.executable, str(Path(__file__).with_name("tinker_server.py")), "api", "--port", str(port),
        "--base-model", str(STARTER), "--backend", "jax", "--backend-config", backend,
        "--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder / 'tinker.db'}",
    ]  # fmt: skip
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    os.environ.setdefault("TINKER_API_KEY", "tml-dummy")
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(port, process, folder / "server.log")
        yield TinkerSettings(url=f"http://127.0.0.1:{port}", base_model=str(STARTER), rank=8, loss="importance_sampling")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = START_SECONDS * 10
    for _ in range(deadline):
        if process.poll() is not None:
            pytest.fail(f"the server ended:\n{log.read_text()[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start")


@pytest.fixture(scope="module")
def client(service: TinkerSettings) -> Any:
    return open_service_client(service)


@pytest.fixture(scope="module")
def trainer(client: Any, service: TinkerSettings) -> TinkerTrainer:
    return make_trainer(client, service)


def make_trainer(client: Any, service: TinkerSettings) -> TinkerTrainer:
    return TinkerTrainer(client, STARTER, base_model=service.base_model, settings=service, learner=LEARNING)


def build_published(file: Path, version: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=version, lineage="l", step=version, uri=file.as_uri(), manifest=(), size_bytes=1
    )


def build_request(seed: int = 1, *, tokens: int = LENGTH - PROMPT, **sampling: float) -> GenerationRequest:
    return GenerationRequest(
        cache_key="e",
        ids=[5 + (7 * place) % 400 for place in range(PROMPT)],
        sampling=SamplingSettings(**sampling),  # type: ignore[arg-type]
        stop_ids=frozenset({STOP}),
        max_tokens=tokens,
        seed=seed,
    )


def scores(ids: list[int]) -> list[float]:
    """Log-probabilities of ids 1.. under the starter policy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    with torch.no_grad():
        values = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(values[place, token]) for place, token in enumerate(ids[1:])]


def batch(advantages: tuple[float, ...] = (1.0, 1.0, 1.0, 0.0)) -> list[TrainingSequence]:
    """Four sequences of one length; the last one has nothing to teach."""
    draw = np.random.default_rng(3)
    made = []
    for number, advantage in enumerate(advantages):
        ids = draw.integers(5, 400, LENGTH).astype(np.int32)
        mask = np.arange(LENGTH) >= PROMPT
        logprobs = np.where(mask, np.array([0.0, *scores(ids.tolist())], np.float32), 0).astype(np.float32)
        made.append(
            TrainingSequence(
                episode_id=f"e{number}", group_id="g", ids=ids, loss_mask=mask, logprobs=logprobs,
                advantages=np.where(mask, np.float32(advantage), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )  # fmt: skip
    return made


async def test_tokens_and_logprobs_are_those_of_the_model_and_stop_ids_are_sent(
    service: TinkerSettings, trainer: TinkerTrainer, tmp_path: Path
) -> None:
    sampler = TinkerSampler(service, max_model_len=512)
    async with sampler.run():
        file = tmp_path / "v0"
        await anyio.to_thread.run_sync(trainer.save_weights, file)
        await sampler.load(build_published(file, 0))
        generations = [await sampler.generate(build_request(seed)) for seed in range(3)]
        again = await sampler.generate(build_request(0))
        full = await sampler.generate(build_request(tokens=0))
        with pytest.raises(RequestRefused, match="temperature"):
            await sampler.generate(build_request(temperature=0.5))
        (tmp_path / "torch").write_bytes(b"not json")
        with pytest.raises(WeightsRejected, match="not a version of a Tinker service"):
            await sampler.load(build_published(tmp_path / "torch", 1))
    assert sampler.version == 0
    assert again.ids == generations[0].ids
    assert (full.ids, full.finish_reason) == ([], "length")
    for generation in generations:
        expected = scores([*build_request().ids, *generation.ids])[PROMPT - 1 :]
        assert max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)) < 1e-3
        assert (generation.ids[-1] == STOP) == (generation.finish_reason == "stop")
        assert STOP not in generation.ids[:-1]


def test_the_loss_falls_over_twenty_steps(client: Any, service: TinkerSettings) -> None:
    trainer, sequences = make_trainer(client, service), batch()
    metrics = [trainer.train(sequences, version=0, progress=0.0) for _ in range(20)]
    losses = [step["loss"] for step in metrics]
    print("losses", [round(loss, 3) for loss in losses])
    assert metrics[0]["logprob_difference_max"] < 1e-3
    assert losses[0] == pytest.approx(-1.0, abs=1e-3)
    assert losses[-1] < 3 * losses[0]
    assert all(after < before for before, after in pairwise(losses[:6]))  # later the tokens are nearly certain
    assert max(losses[6:]) < losses[4]
    assert metrics[0]["sequences_sent"] == 3
    assert math.isfinite(metrics[0]["grad_norm"])


async def test_what_was_trained_is_what_is_sampled_from(client: Any, service: TinkerSettings, tmp_path: Path) -> None:
    trainer, sequences = make_trainer(client, service), batch()
    for _ in range(4):
        await anyio.to_thread.run_sync(lambda: trainer.train(sequences, version=0, progress=0.0))
    file = tmp_path / "v1"
    await anyio.to_thread.run_sync(trainer.save_weights, file)
    sampler = TinkerSampler(service, max_model_len=512)
    async with sampler.run():
        await sampler.load(build_published(file, 1))
        generation = await sampler.generate(build_request())
    expected = scores([*build_request().ids, *generation.ids])[PROMPT - 1 :]
    assert max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True)) > 1e-2
    assert generation.versions[0].version == sampler.version == 1


def test_a_restored_trainer_goes_on_as_if_nothing_had_happened(client: Any, service: TinkerSettings, tmp_path: Path) -> None:
    first, sequences = make_trainer(client, service), batch()
    for _ in range(3):
        first.train(sequences, version=0, progress=0.0)
    first.save_weights(tmp_path / "weights")
    store(first, tmp_path / "state")
    expected = [first.train(sequences, version=0, progress=0.0)["loss"] for _ in range(3)]
    second = make_trainer(client, service)
    second.restore(tmp_path / "state")
    found = [second.train(sequences, version=0, progress=0.0)["loss"] for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-4)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / STATE).write_bytes(b"{}")
    with pytest.raises(UserError, match="not a checkpoint of a Tinker service"):
        second.restore(tmp_path / "torn")


def test_a_service_that_does_not_answer_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(UserError, match="TINKER_API_KEY"):
        open_service_client(TinkerSettings(url="http://127.0.0.1:9"))
