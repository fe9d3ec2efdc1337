"""Divides the GPUs among the roles: those that a vLLM worker asks for (one, or as many as share its model), the others for the
learner, none for environment workers.

Left alone, every process would take the first GPU: vLLM refuses a GPU whose memory is taken, and a learner beside it has none
left.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from fleetbus.config.engine_arguments import count_engine_gpus
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_SECONDS = 20.0
GPUS_PER_MACHINE = 8


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs by role, as `VISIBLE` names them. ``processes`` are those that share the learner's model; one needs no launcher."""

    learner: tuple[str, ...] = ()
    inference: tuple[tuple[str, ...], ...] = ()
    processes: int = 1
    decided: bool = False
    """False: there are no GPUs, or nothing uses them, and the processes' variables stay as they are."""

    @property
    def machines(self) -> tuple[int, ...]:
        """Numbers of the machines that the learner's GPUs are on, `GPUS_PER_MACHINE` on each; one if they have names."""
        return tuple(sorted({int(gpu) // GPUS_PER_MACHINE for gpu in self.learner if gpu.isdecimal()})) or (0,)

    def get_variables(self, role: str, index: int) -> dict[str, str]:
        """The variables that a process of a role gets in its environment."""
        if not self.decided:
            return {}
        chosen = {"learner": self.learner, "inference": self.inference[index] if role == "inference" and self.inference else ()}
        return {VISIBLE: ",".join(chosen.get(role, ()))}

    def describe(self) -> str:
        """One line for a person; empty if nothing was decided."""
        if not self.decided:
            return ""
        workers = ", ".join(f"inference-{index} on {'+'.join(gpus)}" for index, gpus in enumerate(self.inference) if gpus)
        shared = f", {self.processes} processes" if self.processes > 1 else ""
        learner = f"learner on {'+'.join(self.learner)}{shared}" if self.learner else "learner on the CPU"
        return f"GPUs: {'; '.join(filter(None, (learner, workers)))}"


def find_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that processes started from here see, by the names that `VISIBLE` takes; torch is not imported for it."""
    if VISIBLE in variables:
        return tuple(name.strip() for name in variables[VISIBLE].split(",") if name.strip() not in ("", "-1", "NoDevFiles"))
    return tuple(_query("index"))


def find_memory() -> int:
    """Bytes of the smallest GPU of this machine; 0 if they cannot be asked."""
    found = [int(each) for each in _query("memory.total") if each.isdecimal()]
    return min(found, default=0) << 20


def find_cpu_memory() -> int:
    """Bytes of memory of this machine; 0 if it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _query(field: str) -> list[str]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def place_roles(configuration: Configuration, gpus: Sequence[str]) -> Placement:
    """Place the roles of `up`. Raises `UserError` if the GPUs do not suffice."""
    inference, trainer, local = configuration.inference, configuration.trainer, configuration.learner.trainer == "torch"
    processes = trainer.processes
    trains_there = local and trainer.device in ("auto", "cuda")
    samples_there = inference.engine == "vllm" or (inference.engine == "torch" and inference.device in ("auto", "cuda"))
    devices = {"trainer.device": trainer.device if local else ""}
    devices["inference.device"] = inference.device if inference.engine == "torch" else ""
    if not gpus or not (trains_there or samples_there):
        for name, device in devices.items():
            if device.startswith("cuda") and not gpus:
                raise UserError(f"{name} = {device}: no GPU is visible here; set {name} = cpu, or see CUDA_VISIBLE_DEVICES")
        return Placement(processes=max(processes, 1))
    for name, device in devices.items():
        if device.startswith("cuda:"):
            raise UserError(
                f"{name} = {device}: `up` gives each role GPUs, which it counts from 0; set cuda, or name the other role's too"
            )
    engines = inference.workers if samples_there else 0
    each = count_engine_gpus(inference.vllm) if inference.engine == "vllm" else 1
    if engines and inference.engine == "torch" and len(gpus) < engines + trains_there:
        return _share(configuration, gpus, trains_there)
    taken = engines * each
    if len(gpus) < taken + trains_there:
        wanted = f"{engines} inference worker(s) and the learner" if trains_there else f"{engines} inference workers"
        of = f" ({each} per worker)" if each > 1 else ""
        raise UserError(
            f"{wanted} need {taken + trains_there} GPUs{of}, and {len(gpus)} are visible: lower inference.workers, or set "
            "trainer.device = cpu"
        )
    left = tuple(gpus[taken:]) if trains_there else ()
    if processes > len(left) and trains_there:
        raise UserError(f"trainer.processes = {processes}: {len(left)} GPUs are left for the learner, and each needs one")
    learner = left[: processes or len(left)]
    return Placement(
        learner=learner,
        inference=tuple(tuple(gpus[first : first + each]) for first in range(0, taken, each)) or ((),) * inference.workers,
        processes=len(learner) if trains_there else max(processes, 1),
        decided=True,
    )


def _share(configuration: Configuration, gpus: Sequence[str], trains_there: bool) -> Placement:
    """Engines torch take no more of a GPU's memory than they need: where there are too few GPUs they compute beside the
    learner, and beside each other (docs/decisions/0237-engine-torch-on-a-gpu.md)."""
    count, processes = configuration.inference.workers, configuration.trainer.processes
    if processes > len(gpus) and trains_there:
        raise UserError(f"trainer.processes = {processes}: {len(gpus)} GPUs are there for the learner, and each needs one")
    learner = tuple(gpus[: processes or len(gpus)]) if trains_there else ()
    return Placement(
        learner=learner,
        inference=tuple((gpus[index % len(gpus)],) for index in range(count)),
        processes=len(learner) if trains_there else max(processes, 1),
        decided=True,
    )
