"""Eight GPUs as far as a process can tell that starts with this folder on its path: NVIDIA's library, as Python knows it, and
torch.cuda answer as on a machine with eight H100. No kernel runs: what computes ends where it first needs one."""

import importlib.abc
import importlib.util
import sys
from collections import namedtuple
from typing import Any

COUNT, NAME, BYTES = 8, "NVIDIA H100 80GB HBM3", 81_559 << 20
CAPABILITY = (9, 0)

Memory = namedtuple("Memory", "total free used")
Handle = namedtuple("Handle", "number")

NVML = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: COUNT,
    "nvmlDeviceGetHandleByIndex": Handle,
    "nvmlDeviceGetHandleByUUID": lambda uuid: Handle(0),
    "nvmlDeviceGetName": lambda handle: NAME,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle.number}",
    "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
    "nvmlDeviceGetMemoryInfo": lambda handle: Memory(BYTES, BYTES, 0),
    "nvmlSystemGetDriverVersion": lambda: "580.95.05",
    "nvmlDeviceGetP2PStatus": lambda handle, other, index: 0,
}


def answer_for_nvml(module: Any) -> None:
    for name, function in NVML.items():
        setattr(module, name, function)


def answer_for_torch(module: Any) -> None:
    cuda = module.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: COUNT
    cuda._device_count_nvml = lambda: COUNT
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: NAME


ANSWERS = {"vllm.third_party.pynvml": answer_for_nvml, "torch": answer_for_torch}


class Finder(importlib.abc.MetaPathFinder):
    """Lets the modules of `ANSWERS` be loaded as they are, and changes them then."""

    def find_spec(self, name, path, target=None):
        if name not in ANSWERS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load, answer = spec.loader.exec_module, ANSWERS[name]

        def exec_module(module):
            load(module)
            answer(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
