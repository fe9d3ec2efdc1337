"""vLLM's CUDA wheel on a machine without a GPU: every name that we call, by its real signature and defaults, and an engine's
start under stand-ins for NVIDIA's libraries, up to where a GPU is needed. `just test-vllm-cuda`."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import SamplingSettings
from fleetbus_workers.inference.base import GenerationRequest
from fleetbus_workers.inference.vllm import engine as engines
from fleetbus_workers.inference.vllm import sampler as samplers
from fleetbus_workers.inference.vllm.engine import EngineSettings, build_engine_arguments
from fleetbus_workers.inference.vllm.load_recorder import LoadRecorder
from fleetbus_workers.weights.file import WeightsRejected
from tests.support.vllm_engine import STARTER, build_request, move_weights, publish

pytestmark = [
    pytest.mark.vllm_cuda,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: just test-vllm-cuda"),
]

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in_gpus"
START_SECONDS = 800

DEFAULTS: dict[str, dict[str, object]] = {
    "engine": {
        "disable_log_stats": False,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.92,
        "hf_overrides": {},
        "kv_cache_memory_bytes": None,
        "logprobs_mode": "raw_logprobs",
        "max_cpu_loras": None,
        "max_loras": 1,
        "max_model_len": None,
        "seed": 0,
        "tensor_parallel_size": 1,
        "worker_extension_cls": "",
    },
    "sampling": {
        "flat_logprobs": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "n": 1,
        "prompt_logprobs": None,
        "stop": None,
    },
    "pause_generation": {"mode": "abort", "clear_cache": True},
    "reset_prefix_cache": {"reset_running_requests": False, "reset_connector": False},
    "add_lora": {},
    "lora": {"lora_path": "", "base_model_name": None, "load_inplace": False},
}
"""Of what we set, and of what we leave out because it is this: one that moves changes what an engine does."""


def list_defaults(callee: Any) -> dict[str, object]:
    parameters = inspect.signature(callee).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def configure(**settings: Any) -> EngineSettings:
    return EngineSettings(folder=STARTER, max_model_len=512, dtype="bfloat16", **settings)


def test_defaults_are_where_they_were() -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    made = AsyncEngineArgs(model="m")
    fields = {name: getattr(made, name, "gone") for name in DEFAULTS["engine"]}
    found = {
        "engine": fields,
        "sampling": list_defaults(SamplingParams),
        "lora": list_defaults(LoRARequest),
        **{name: list_defaults(getattr(AsyncLLM, name)) for name in ("pause_generation", "reset_prefix_cache", "add_lora")},
    }
    for name, wanted in DEFAULTS.items():
        assert {key: found[name].get(key, "gone") for key in wanted} == wanted, name


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 12}, {"kv_cache_mib": 64}, {"options": {"tensor_parallel_size": 2}}])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_an_engine_takes_our_arguments(settings: dict[str, Any], has_gpu: bool) -> None:
    from vllm import AsyncEngineArgs

    wanted = build_engine_arguments(configure(**settings), has_gpu=has_gpu)
    made = AsyncEngineArgs(**wanted)
    assert {name: getattr(made, name) for name in wanted} == wanted


def test_the_variables_that_we_set_are_ones_that_vllm_reads() -> None:
    import torch
    from vllm import envs

    names = {name for name in engines.ENVIRONMENT | engines.CPU_ENVIRONMENT if name.startswith("VLLM_")}
    assert names <= envs.environment_variables.keys()
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" in inspect.getsource(torch.cuda)


def test_engines_begin_as_new_processes_and_cuda_is_untouched_by_then() -> None:
    code = (
        "from fleetbus_workers.inference.vllm.engine import is_gpu_available; is_gpu_available(); import torch; "
        "from vllm.utils.system_utils import get_mp_context; print(get_mp_context().get_start_method(), "
        "torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=START_SECONDS, check=True, env=os.environ
    )
    assert found.stdout.split() == ["spawn", "False", "False"]


def test_stats_and_outputs_have_the_fields_that_are_read() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    recorder = LoadRecorder().attach(None)
    recorder.record(SchedulerStats(), IterationStats())
    assert recorder.engine_load.running == 0 and recorder.sampled_tokens == 0
    needed = {name for name, _ in inspect.getmembers(StatLoggerBase, inspect.isfunction)} - {"__init__", "record_sleep_state"}
    assert all(callable(getattr(recorder, name)) for name in needed)
    for name in needed:
        assert list(inspect.signature(getattr(LoadRecorder, name)).parameters) == list(
            inspect.signature(getattr(StatLoggerBase, name)).parameters
        )
    assert {field.name for field in dataclasses.fields(CompletionOutput)} >= {
        "token_ids", "logprobs", "finish_reason", "weight_versions"
    }  # fmt: skip
    assert {"outputs", "num_cached_tokens", "prompt_token_ids"} <= inspect.signature(RequestOutput.__init__).parameters.keys()


class Engines:
    """Engines whose methods take what vLLM's own take, and remember it."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def start(self, settings: EngineSettings, recorder: LoadRecorder) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = create_autospec(AsyncLLM, instance=True)
        engine.generate.side_effect = self.answer
        engine.reset_prefix_cache.return_value = True
        self.made.append(engine)
        return engine

    def answer(self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None) -> AsyncIterator[Any]:
        async def stream() -> AsyncIterator[Any]:
            place = SimpleNamespace(logprob=-1.0)
            span = SimpleNamespace(version="0", start=0, end=2)
            chosen = SimpleNamespace(
                finish_reason="stop", token_ids=[7, 8], logprobs=[{7: place}, {8: place}], weight_versions=[span]
            )
            yield SimpleNamespace(outputs=[chosen], num_cached_tokens=1, prompt_token_ids=prompt["prompt_token_ids"])

        return stream()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(samplers, "start_engine", made.start)
    return made


async def test_every_call_of_the_sampler_fits_the_real_signatures(tmp_path: Path, fleet: Engines) -> None:
    """A request, a version, one that vLLM refuses, and the engine's end."""
    sampler = samplers.VllmSampler(configure(), place=tmp_path / "served")
    async with sampler.run():
        generation = await sampler.generate(build_request(1, temperature=0.5))
        assert generation.ids == [7, 8] and sampler.engine_load.running == 0
        await sampler.load(publish(tmp_path, 1, move_weights(1)))
        engine = fleet.made[0]
        engine.collective_rpc.side_effect = [RuntimeError("no room"), None]
        with pytest.raises(WeightsRejected, match="no room"):
            await sampler.load(publish(tmp_path, 2, move_weights(2)))
    called = {call[0].split("().")[0] for call in engine.method_calls}
    assert called >= {
        "generate", "pause_generation", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume_generation",
        "shutdown",
    }  # fmt: skip


async def test_adapters_and_a_dead_engine_fit_the_real_signatures(tmp_path: Path, fleet: Engines) -> None:
    import torch
    from vllm.v1.engine.exceptions import EngineDeadError

    from fleetbus_workers.weights.adapters import DOWN, PREFIX, UP

    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    shape = move_weights(0)["model.layers.0.self_attn.q_proj.weight"].shape
    adapters = {name + DOWN: torch.ones(4, shape[1]), name + UP: torch.ones(shape[0], 4)}
    sampler = samplers.VllmSampler(configure(lora_rank=4), place=tmp_path / "served")
    async with sampler.run():
        await sampler.load(publish(tmp_path, 1, adapters))
        assert (await sampler.generate(build_request(1))).versions[0].version == 1
        fleet.made[0].generate.side_effect = EngineDeadError()
        assert (await sampler.generate(build_request(2))).ids == [7, 8]
        assert len(fleet.made) == 2 and sampler.stats["engine_restarts"] == 1


async def test_a_call_that_vllm_does_not_know_is_noticed(tmp_path: Path, fleet: Engines) -> None:
    """What a renamed argument would do to the tests above."""
    sampler = samplers.VllmSampler(configure(), place=tmp_path / "served")
    async with sampler.run():
        with pytest.raises(TypeError, match="unexpected keyword argument 'clear_caches'"):
            fleet.made[0].pause_generation(mode="keep", clear_caches=False)


def test_requests_and_prompts_have_the_arguments_that_we_give() -> None:
    from vllm import TokensPrompt
    from vllm.v1.worker.gpu_worker import Worker

    assert {"prompt_token_ids", "cache_salt", "multi_modal_data", "multi_modal_uuids"} <= TokensPrompt.__annotations__.keys()
    assert callable(Worker.reload_weights)
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert {"weights_path", "weights_iterator"} <= inspect.signature(GPUModelRunner.reload_weights).parameters.keys()
    assert GenerationRequest(cache_key="e", ids=[1], sampling=SamplingSettings(), stop_ids=frozenset(), max_tokens=1, seed=1)


START = """
from fleetbus.errors import UserError
from fleetbus_workers.inference.vllm.engine import EngineSettings, is_gpu_available, start_engine
from fleetbus_workers.inference.vllm.load_recorder import LoadRecorder
from pathlib import Path
import sys

if __name__ == "__main__":
    assert is_gpu_available()
    from vllm.platforms import current_platform
    print("platform", current_platform.device_name, current_platform.get_device_name(0), flush=True)
    try:
        start_engine(EngineSettings(folder=Path(sys.argv[1]), max_model_len=512, dtype="bfloat16"), LoadRecorder())
    except UserError as error:
        print("refused", error, flush=True)
"""


def test_an_engine_on_eight_gpus_starts_up_to_where_it_needs_one(tmp_path: Path) -> None:
    """The platform is found, our arguments become its configuration, its process is spawned with our extension in its worker,
    and the worker asks for its device: no driver is there to give it one."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(STAND_IN / "libcuda.c")], check=True)
    script = tmp_path / "start.py"
    script.write_text(START)
    paths = [str(STAND_IN), *(str(ROOT / name) for name in ("", "schemas", "workers"))]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": str(tmp_path), "VLLM_LOGGING_LEVEL": "INFO"}
    with subprocess.Popen(
        [sys.executable, str(script), str(STARTER)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | variables, cwd=tmp_path, start_new_session=True,
    ) as engine:  # fmt: skip
        try:
            said, _ = engine.communicate(timeout=START_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # all that vLLM started has ended
                os.killpg(engine.pid, signal.SIGKILL)
    assert "platform cuda NVIDIA H100 80GB HBM3" in said, said[-4000:]
    assert "refused" in said and engine.returncode == 0, said[-4000:]
    assert "in init_device" in said and "Found no NVIDIA driver on your system" in said, said[-4000:]
    assert "Cannot re-initialize CUDA" not in said


def test_an_argument_that_vllm_does_not_take_is_one_line() -> None:
    from vllm import AsyncEngineArgs

    wanted = build_engine_arguments(configure(options={"tensor_paralell_size": 2}), has_gpu=True)
    with pytest.raises(TypeError, match="tensor_paralell_size"):
        AsyncEngineArgs(**wanted)
    with pytest.raises(UserError, match="rank 512"):
        build_engine_arguments(configure(lora_rank=999), has_gpu=True)
