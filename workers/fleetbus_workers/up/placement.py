"""Divides the GPUs among the roles: those that a vLLM worker asks for (one, or as many as share its model), the others for the
learner, or in equal parts for the learners of several policies, none for environment workers.

Left alone, every process would take the first GPU: vLLM refuses a GPU whose memory is taken, and a learner beside it has none
left.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from fleetbus.config.engine_arguments import count_engine_gpus
from fleetbus.config.seats import list_trained_seats, parse_seats
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_SECONDS = 20.0
GPUS_PER_MACHINE = 8


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs by role, as `VISIBLE` names them. ``processes`` are those that share the learner's model; one needs no launcher.
    ``others`` are those of the learners of seats; the last workers of ``inference`` serve the ``seats``."""

    learner: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()
    inference: tuple[tuple[str, ...], ...] = ()
    seats: tuple[str, ...] = ()
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
        placed = {"learner": self.learners, "inference": self.inference}.get(role, ())
        return {VISIBLE: ",".join(placed[index] if index < len(placed) else ())}

    @property
    def learners(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs of each learner."""
        return (self.learner, *self.others)

    def describe(self) -> str:
        """One line for a person; empty if nothing was decided."""
        if not self.decided:
            return ""
        numbers = (*range(len(self.inference) - len(self.seats)), *self.seats)
        placed = zip(numbers, self.inference, strict=True)
        workers = ", ".join(f"inference-{name} on {'+'.join(gpus)}" for name, gpus in placed if gpus)
        shared = f", {self.processes} processes" if self.processes > 1 else ""
        learner = f"learner on {'+'.join(self.learner)}{shared}" if self.learner else "learner on the CPU"
        others = [f"learner of a seat on {'+'.join(gpus)}" for gpus in self.others if gpus]
        return f"GPUs: {'; '.join(filter(None, (learner, *others, workers)))}"


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
    seats = tuple(seat.seat for seat in parse_seats(configuration.run.seats) if seat.is_served and not seat.url)
    learners = 1 + len(list_trained_seats(configuration.run))
    trainers = learners if trains_there else 0
    engines = inference.workers + len(seats) if samples_there else 0
    each = count_engine_gpus(inference.vllm) if inference.engine == "vllm" else 1
    if engines and inference.engine == "torch" and len(gpus) < engines + trainers:
        return _share(configuration, gpus, trainers, seats)
    taken = engines * each
    if len(gpus) < taken + trainers:
        of_seats = f"{learners} learners" if learners > 1 else "the learner"
        wanted = f"{engines} inference worker(s) and {of_seats}" if trains_there else f"{engines} inference workers"
        of = f" ({each} per worker)" if each > 1 else ""
        raise UserError(
            f"{wanted} need {taken + trainers} GPUs{of}, and {len(gpus)} are visible: lower inference.workers, or set "
            "trainer.device = cpu"
        )
    left = _divide(gpus[taken:], trainers)
    if left and processes > len(left[0]):
        of = "the learner" if learners == 1 else "each learner"
        raise UserError(f"trainer.processes = {processes}: {len(left[0])} GPUs are left for {of}, and each needs one")
    learner, *others = (part[: processes or len(part)] for part in left or ((),))
    return Placement(
        learner=learner,
        others=tuple(others),
        seats=seats,
        inference=tuple(tuple(gpus[first : first + each]) for first in range(0, taken, each))
        or ((),) * (inference.workers + len(seats)),
        processes=len(learner) if trainers else max(processes, 1),
        decided=True,
    )


def _divide(gpus: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    """As many equal parts of at least one GPU, which parts share where there are too few."""
    size = max(len(gpus) // max(parts, 1), 1)
    firsts = [part * size % max(len(gpus), 1) for part in range(parts)]
    return [tuple(gpus[first : first + size]) for first in firsts]


def _share(configuration: Configuration, gpus: Sequence[str], trainers: int, seats: tuple[str, ...]) -> Placement:
    """Engines torch take no more of a GPU's memory than they need: where there are too few GPUs they compute beside the
    learner, and beside each other (docs/decisions/0237-engine-torch-on-a-gpu.md)."""
    count, processes = configuration.inference.workers + len(seats), configuration.trainer.processes
    left = _divide(gpus, trainers)
    if left and processes > len(left[0]):
        of = "the learner" if trainers == 1 else "each learner"
        raise UserError(f"trainer.processes = {processes}: {len(left[0])} GPUs are there for {of}, and each needs one")
    learner, *others = (part[: processes or len(part)] for part in left or ((),))
    return Placement(
        learner=learner,
        others=tuple(others),
        seats=seats,
        inference=tuple((gpus[index % len(gpus)],) for index in range(count)),
        processes=len(learner) if trainers else max(processes, 1),
        decided=True,
    )
