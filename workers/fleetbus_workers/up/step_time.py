"""Computes the time of a step from the model's shape, the settings and what a GPU can do at most. Pure.

Training is floating point operations over a share of the GPU's peak, or what FSDP moves over the links, whichever is longer.
Sampling is bound by memory: every decoding step reads the weights and the keys and values of all sequences that run. Every
share is an assumption that is printed with the result; environments' time is in neither. Episodes are taken to be as long as
their limits let them, so that real steps are shorter.
"""

import msgspec

from fleetbus.config.engine_arguments import count_engine_gpus, parse_engine_arguments
from fleetbus.config.settings import Configuration
from fleetbus_workers.up.memory import MASTER_BYTES, ModelShape, Parts, count_tokens, plan_learner


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a GPU can do, and the shares of it that are assumed. Defaults: an H100 SXM by its data sheet (dense
    bfloat16, HBM3, NVLink in one direction, PCIe 5), 400 Gb/s between machines for each GPU, and the memory of a machine's
    CPUs, whose share is ``bandwidth_share`` too. ``latency``: seconds until a sum over GPUs begins to move."""

    flops: float = 989e12
    bandwidth: float = 3.35e12
    link: float = 450e9
    latency: float = 1e-5
    network: float = 50e9
    bus: float = 63e9
    host: float = 300e9
    mfu: float = 0.35
    bandwidth_share: float = 0.6
    link_share: float = 0.7


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the parts of a step, 0 for a role without GPUs; ``optimizer`` is AdamW on the CPU. ``overlap``: both go on at
    once (``max_staleness`` above 0)."""

    tokens: int
    device: Device
    training: float
    moving: float
    optimizer: float
    sampling: float
    tokens_per_second: float
    overlap: bool

    @property
    def seconds(self) -> float:
        train = max(self.training, self.moving) + self.optimizer
        return max(train, self.sampling) if self.overlap else train + self.sampling


def estimate_step(
    shape: ModelShape,
    configuration: Configuration,
    *,
    processes: int,
    engines: int,
    engine: Parts | None,
    device: Device,
    machines: int = 1,
) -> StepTime:
    """The step of a learner on ``processes`` GPUs (0: none) of so many ``machines``, with so many vLLM workers, of which each
    holds ``engine``."""
    episodes = configuration.learner.groups * configuration.learner.group_size
    longest = configuration.episode.max_episode_tokens
    sampled = min(configuration.episode.max_turns * configuration.episode.max_tokens, longest)
    training = moving = optimizer = sampling = rate = 0.0
    if processes:
        tokens = episodes * longest
        adapted = configuration.trainer.lora_rank > 0  # frozen weights pass gradients on and get none
        passes = 1 + (1 if adapted else 2) + configuration.trainer.gradient_checkpointing  # forward, backward, forward again
        updates = configuration.trainer.epochs
        training = updates * passes * tokens * count_flops(shape, longest) / (processes * device.flops * device.mfu)
        rounds = max(tokens / (processes * count_tokens(configuration)), 1.0)
        if processes > 1:  # gathered in bfloat16 for the forward and the backward pass, gradients reduced in float32
            moved = updates * rounds * (2 + 2 + (0 if adapted else 4)) * shape.parameters
            moving = moved / ((device.link if machines == 1 else device.network) * device.link_share)
        if configuration.trainer.offload_optimizer:
            updates *= configuration.learner.minibatches
            own = plan_learner(shape, configuration, processes).moments / (2 * MASTER_BYTES)
            optimizer = updates * own * _count_offloaded_seconds(device, processes / machines)
    if engines and engine is not None:
        gpus = count_engine_gpus(configuration.inference.vllm)
        weight, cached = _count_bytes(configuration)
        room = gpus * engine.parts.get("cache", 0) / (shape.count_cached() * cached * longest)
        running = max(min(configuration.inference.max_num_seqs, _count_played(configuration) / engines, room), 1.0)
        read = weight * count_read(shape, running) + running * shape.count_cached() * cached * longest / 2
        seconds = read / (gpus * device.bandwidth * device.bandwidth_share)
        rate = running / (seconds + _count_summing_seconds(shape, configuration, running, device)) / gpus
        prompts = episodes * (longest - sampled) * count_flops(shape, longest) / (device.flops * device.mfu)
        sampling = (episodes * sampled / rate + prompts) / (engines * gpus)
    return StepTime(
        tokens=episodes * longest, device=device, training=training, moving=moving, optimizer=optimizer, sampling=sampling,
        tokens_per_second=rate,
        overlap=configuration.learner.max_staleness > 0,
    )  # fmt: skip


def _count_bytes(configuration: Configuration) -> tuple[int, int]:
    """Bytes of a weight, and of a number in the cache, which engine torch keeps in float32."""
    weight = MASTER_BYTES if configuration.inference.dtype == "float32" else 2
    return weight, MASTER_BYTES if configuration.inference.engine == "torch" else weight


def _count_summing_seconds(shape: ModelShape, configuration: Configuration, running: float, device: Device) -> float:
    """Of a decoding step under tensor parallelism: two sums over the GPUs in each layer, of a hidden state per sequence."""
    split = parse_engine_arguments(configuration.inference.vllm).get("tensor_parallel_size", 1)
    moved = 2 * (split - 1) / split * 2 * running * shape.hidden
    return 2 * shape.layers * (moved / (device.link * device.link_share) + device.latency) if split > 1 else 0.0


def _count_offloaded_seconds(device: Device, processes: float) -> float:
    """Of one parameter: 12 bytes over the bus of its process, 28 in the memory that a machine's processes share."""
    return 12 / (device.bus * device.link_share) + 28 * processes / (device.host * device.bandwidth_share)


def _count_played(configuration: Configuration) -> int:
    """Episodes that are played at a time: as many as environment workers take, and as staleness lets be asked for."""
    learner, environment = configuration.learner, configuration.environment
    asked = learner.groups * learner.group_size * (1 + learner.max_staleness)
    return min(environment.workers * environment.slots, asked) if environment.workers else asked


def count_flops(shape: ModelShape, length: int) -> float:
    """Floating point operations of the forward pass of one token in a sequence of ``length``: two per weight that it passes,
    and those of its attention to half of the sequence."""
    return 2.0 * count_active(shape) + 2.0 * length * shape.heads * shape.head_dim * shape.layers


def count_active(shape: ModelShape) -> int:
    """Weights that one token is multiplied with: without the embedding that is looked up, with the experts that it takes."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate + shape.hidden * shape.experts
    return shape.layers * layer + shape.vocabulary * shape.hidden


def count_read(shape: ModelShape, running: float) -> float:
    """Weights that a decoding step of ``running`` sequences reads: of experts those that any takes."""
    if not shape.routed:
        return float(shape.parameters - (0 if shape.tied else shape.vocabulary * shape.hidden))
    missed: float = (1 - shape.routed / shape.experts) ** running
    own = 3 * shape.hidden * shape.intermediate
    experts = shape.layers * own * (shape.experts // shape.routed) * (1 - missed)
    return count_active(shape) - shape.layers * own + experts


def format_step(step: StepTime) -> list[str]:
    """Lines for a person: the result, and what it was computed with."""
    device = step.device
    train = f"training {step.training:.1f} s" + (f" (moving shards {step.moving:.1f} s beside it)" if step.moving else "")
    if step.optimizer:
        train += f" and the optimizer on the CPU {step.optimizer:.1f} s"
    parts = [train] if step.training else []
    if step.sampling:
        parts.append(f"sampling {step.sampling:.1f} s ({step.tokens_per_second:,.0f} tokens/s per GPU)")
    if not parts:
        return []
    if step.training and step.sampling:
        parts[-1] += f"; a step takes {'the longer' if step.overlap else 'both'}, {step.seconds:.1f} s"
    return [
        f"step, computed, of {step.tokens:,} tokens, without environments: {', '.join(parts)}",
        f"  assumed: {device.flops / 1e12:.0f} TFLOP/s x {device.mfu:g}, memory {device.bandwidth / 1e12:.2f} TB/s x "
        f"{device.bandwidth_share:g}, links {device.link / 1e9:.0f} GB/s ({device.network / 1e9:.0f} between machines) x "
        f"{device.link_share:g}, episodes at their limits",
    ]
