"""Plans a run's memory on each GPU before anything starts: `fleetbus plan` prints it, `up` refuses what does not fit."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.up.memory import ModelShape, Parts, count_usable, plan_engine, plan_learner, plan_torch_engine, read_shape
from fleetbus_workers.up.placement import Placement
from fleetbus_workers.up.step_time import Device, StepTime, estimate_step, format_step

CERTAIN = ("weights", "gradients", "optimizer", "critic", "reference")
"""Parts that are arithmetic; the others are estimates, upon which nobody is refused."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The places of a run's roles, the memory of each GPU, and what does not fit into ``memory`` bytes."""

    shape: ModelShape
    placement: Placement
    memory: int
    roles: tuple[Parts, ...]
    step: StepTime | None = None

    @property
    def usable(self) -> int:
        """Bytes of each GPU without what fragmentation takes."""
        return count_usable(self.memory)

    @property
    def shortages(self) -> tuple[str, ...]:
        """One line for each role that does not fit."""
        return tuple(self._find_shortages())

    def _find_shortages(self) -> Iterator[str]:
        for role in self.roles:
            if role.total > self.usable:
                largest = max(role.parts, key=lambda name: role.parts[name])
                yield (
                    f"{role.name} needs {_format_gb(role.total)} of {_format_gb(self.usable)} GB on each of its GPUs, "
                    f"{_format_gb(role.parts[largest])} of it {largest}: {_advise(role.name, largest)}"
                )
        sizes = {role.name: role.total for role in self.roles}
        held: dict[str, int] = {}
        for gpu in (gpu for gpus in self.placement.learners for gpu in gpus):
            held[gpu] = held.get(gpu, 0) + sizes.get("learner", 0)
        for gpu in (gpu for gpus in self.placement.inference for gpu in gpus):
            held[gpu] = held.get(gpu, 0) + sizes.get("inference", 0)
        most = max(held.values(), default=0)
        if most > self.usable >= max(sizes.values(), default=0):
            yield (
                f"roles that share a GPU need {_format_gb(most)} of {_format_gb(self.usable)} GB together: lower "
                "inference.max_num_seqs or inference.workers, or set inference.device = cpu"
            )

    def check(self) -> None:
        """Raise `UserError` if the learner's numbers alone are more than its GPUs hold."""
        for role in self.roles:
            least = sum(role.parts.get(name, 0) for name in CERTAIN)
            if role.name == "learner" and least > self.memory:
                raise UserError(
                    f"the learner's weights, gradients and optimizer need {_format_gb(least)} GB on each of its GPUs, which "
                    f"have {_format_gb(self.memory)}: {_advise('learner', 'weights')}"
                )


def build_plan(
    shape: ModelShape, configuration: Configuration, placement: Placement, memory: int, device: Device | None = None
) -> Plan:
    """The plan of a placement that was decided; with the time of a step on GPUs of one kind if ``device`` says which."""
    engine = None
    if any(placement.inference):
        is_torch = configuration.inference.engine == "torch"
        engine = plan_torch_engine(shape, configuration) if is_torch else plan_engine(shape, configuration, memory)
    roles = [engine] if engine is not None else []
    if placement.learner:
        roles.insert(0, plan_learner(shape, configuration, placement.processes))
    step = None
    if device is not None:
        processes, engines = placement.processes if placement.learner else 0, sum(map(bool, placement.inference))
        step = estimate_step(
            shape,
            configuration,
            processes=processes,
            engines=engines,
            engine=engine,
            device=device,
            machines=len(placement.machines),
        )
    return Plan(shape=shape, placement=placement, memory=memory, roles=tuple(roles), step=step)


def format_plan(plan: Plan, name: str) -> list[str]:
    """Lines for a person."""
    shape = plan.shape
    experts = f", {shape.experts} experts of which a token takes {shape.routed}" if shape.experts else ""
    size = f"{shape.parameters / 1e9:.2f} B parameters, {shape.layers} layers of {shape.hidden:,}{experts}"
    reserve = f"of {_format_gb(plan.memory)} GB, {_format_gb(plan.memory - plan.usable)} are left to fragmentation"
    lines = [f"{name}: {size}", *_describe_placement(plan), f"each GPU: {reserve}"]
    for role in plan.roles:
        parts = " + ".join(f"{part} {_format_gb(size)}" for part, size in role.parts.items())
        verdict = "fits" if role.total <= plan.usable else "DOES NOT FIT"
        lines.append(f"{role.name}, GB per GPU: {parts} = {_format_gb(role.total)} of {_format_gb(plan.usable)}: {verdict}")
        lines.append(f"  {role.note}")
    if plan.placement.learner:
        lines.append(f"CPU memory while a checkpoint is written: {_format_gb(_count_checkpoint(plan))} GB on the machine")
    lines += format_step(plan.step) if plan.step is not None and not plan.shortages else []
    return lines + [f"does not fit: {line}" for line in plan.shortages]


def _describe_placement(plan: Plan) -> list[str]:
    lines = [plan.placement.describe()]
    if (machines := len(plan.placement.machines)) > 1:
        lines.append(f"the learner is on {machines} machines: start the roles by hand, it with torchrun --nnodes {machines}")
    return lines


def load_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Raises `UserError`."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, *UNREADABLE) as error:
        raise UserError(f"{folder} has no config.json that can be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{folder}: config.json holds no JSON object")
    return read_shape(config, f"{folder}: config.json")


def find_shape(folder: Path) -> ModelShape | None:
    """The same, None for a model whose shape is unknown."""
    try:
        return load_shape(folder)
    except UserError:
        return None


def _count_checkpoint(plan: Plan) -> int:
    learner = next(role for role in plan.roles if role.name == "learner")
    copied = learner.moments * 3 // 2  # weights that are trained, and two numbers of AdamW's for each
    return (copied + (0 if "optimizer" in learner.parts else learner.moments)) * plan.placement.processes


def _advise(role: str, part: str) -> str:
    if role == "inference":
        return "lower inference.max_model_len, inference.max_num_seqs or, with vLLM, inference.kv_cache_mib"
    if part in ("activations", "logits"):
        return "lower trainer.token_budget, or set trainer.gradient_checkpointing = true"
    offload = "trainer.offload_optimizer = true, " if part == "optimizer" else ""
    return f"more GPUs for the learner (fewer inference.workers), {offload}or trainer.lora_rank = 32"


def _format_gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
