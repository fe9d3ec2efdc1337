"""``fleetbus plan``: where a run's roles would go, what each GPU would hold, how long a step would take."""

from typing import Any

import click
import msgspec

from fleetbus.config.profile import describe_profile
from fleetbus.errors import UserError
from fleetbus_workers.assembly.hub_model import find_config
from fleetbus_workers.cli.options import NumberRange, SettingsCommand, load_settings, settings_options
from fleetbus_workers.command.exit_status import CRASHED, FINISHED
from fleetbus_workers.up.model_limits import fit_limits
from fleetbus_workers.up.placement import place_roles
from fleetbus_workers.up.plan import build_plan, format_plan, load_shape
from fleetbus_workers.up.profile import fit_machine
from fleetbus_workers.up.step_time import Device

H100_GB = round((81_559 << 20) / 1e9, 1)
"""The 81,559 MiB that an H100 of "80 GB" reports."""


@click.command("plan", cls=SettingsCommand)
@click.option("--gpus", type=click.IntRange(1), required=True, metavar="N", help="GPUs of the machine")
@click.option(
    "--gpu-memory", type=NumberRange(1), default=H100_GB, metavar="GB", help=f"Memory of each, in 10^9 bytes [{H100_GB}]"
)
@click.option("--gpu-tflops", type=NumberRange(1), default=989.0, metavar="N", help="Peak of each in bfloat16 [989: an H100]")
@click.option(
    "--gpu-bandwidth", type=NumberRange(1), default=3350.0, metavar="GB/S", help="Memory bandwidth of each [3350: an H100]"
)
@click.option("--mfu", type=NumberRange(0.01, 1), default=0.35, metavar="SHARE", help="Share of the peak in training [0.35]")
@settings_options("run", "learner", "algorithm", "trainer", "inference", "episode")
def command(gpus: int, gpu_memory: float, gpu_tflops: float, gpu_bandwidth: float, mfu: float, **values: Any) -> int:
    """Print the placement of a model on GPUs, the memory of each by part and the time of a step, before anything starts; no GPU
    is needed. Times are computed from peaks and shares that are printed with them, not measured.

    --model is a folder or a Hub id, of which only config.json is read. Settings are those that `up` would choose on such a
    machine, unless they are given. Exit status 1 if something does not fit.
    """
    loaded = load_settings(values, earlier=False)
    model = loaded.configuration.run.model
    if not model:
        raise UserError("--model: name a folder with a config.json, or a model of the Hub such as Qwen/Qwen3-8B")
    folder = find_config(model)
    shape, memory = load_shape(folder), int(gpu_memory * 1e9)
    names = tuple(map(str, range(gpus)))
    run = msgspec.structs.replace(loaded.configuration.run, model=str(folder))
    configuration = msgspec.structs.replace(loaded.configuration, run=run)
    configuration = fit_limits(configuration, loaded.given)
    configuration, chosen = fit_machine(configuration, loaded.given, names, memory, shape, starts=False)
    device = Device(flops=gpu_tflops * 1e12, bandwidth=gpu_bandwidth * 1e9, mfu=mfu)
    plan = build_plan(shape, configuration, place_roles(configuration, names), memory, device)
    for line in [*format_plan(plan, model), *([chosen] if chosen else []), describe_profile(configuration)]:
        click.echo(line)
    return CRASHED if plan.shortages else FINISHED
