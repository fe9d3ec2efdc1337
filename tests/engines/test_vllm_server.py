"""`OpenAISampler` on vLLM's own HTTP server, for real: `just test-vllm`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus_schemas import ChatMessage, PolicyPublished
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.openai import OpenAISampler
from fleetbus_workers.inference.openai.dialects import StreamChunk
from fleetbus_workers.inference.openai.partial_generation import PartialGeneration
from fleetbus_workers.inference.weight_folders import WeightFolders
from tests.support import vllm_engine
from tests.support.openai_sampling import until
from tests.support.vllm_engine import CLOSE, MARKS, STARTER, move_weights, publish

pytestmark = MARKS

START_SECONDS = 900

build_request = partial(vllm_engine.build_request, length=160, tokens=16)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> WeightFolders:
    return WeightFolders(STARTER, tmp_path_factory.mktemp("served"), untie=True)


@pytest.fixture(scope="module")
def url(served: WeightFolders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served.prepare_base()),
        "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20), "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
    ]  # fmt: skip
    variables = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(START_SECONDS * 4):
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
        else:
            return
    pytest.fail("the server did not start")


async def test_a_real_server_answers_as_the_torch_engine_before_and_after_a_swap_and_in_the_middle_of_one(
    url: str, served: WeightFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetbus_workers.inference.torch import TorchSampler

    template = ChatTemplate(STARTER)
    prompt = template.encode_prompt([ChatMessage(role="user", content="Hello")], [])
    sampler = OpenAISampler([url], codec=template, prompt=prompt, weights=served, slots=16)
    torch_sampler = TorchSampler(STARTER, slots=4, max_model_len=512)
    with anyio.fail_after(1200):
        async with torch_sampler.run(), sampler.run():
            [server] = sampler._pool.servers
            state = server.state
            assert (state.dialect and state.dialect.name, state.takes_weights, state.scaled_logprobs) == (
                "generate",
                True,
                True,
            )
            for version in (0, 1, 2):
                if version:
                    policy = publish(tmp_path, version, move_weights(version))
                    await sampler.load(policy)
                    await torch_sampler.load(policy)
                for seed in range(3):
                    await compare_samplers(sampler, torch_sampler, build_request(seed, temperature=0.0), version)
            policy = publish(tmp_path, 3, move_weights(3))
            [old, new] = (await swap_mid_generation(sampler, policy, monkeypatch)).versions
            assert (old.version, new.version, new.stop) == (2, 3, 300)
            await until(lambda: sampler.engine_load.running is not None)
            load = sampler.engine_load
            assert load.waiting is not None and load.preemptions is not None and 0 <= (load.kv_cache_use or 0.0) <= 1


async def compare_samplers(sampler: Any, torch_sampler: Any, request: GenerationRequest, version: int) -> None:
    ours, theirs = await sampler.generate(request), await torch_sampler.generate(request)
    assert ours.ids == theirs.ids
    assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < CLOSE
    assert [span.version for span in ours.versions] == [version]


async def swap_mid_generation(sampler: Any, policy: PolicyPublished, monkeypatch: pytest.MonkeyPatch) -> Any:
    found: list[Any] = []
    begun, append = anyio.Event(), PartialGeneration.append_chunk

    def append_and_tell(answer: PartialGeneration, piece: StreamChunk, version: int) -> None:
        append(answer, piece, version)
        if answer.ids:
            begun.set()

    monkeypatch.setattr(PartialGeneration, "append_chunk", append_and_tell)

    async def generate() -> None:
        found.append(await sampler.generate(build_request(9, tokens=300, stops=frozenset())))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await begun.wait()
        await sampler.load(policy)
    assert sampler.stats["interruptions"] == 1
    return found[0]
