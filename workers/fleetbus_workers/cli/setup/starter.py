"""``fleetbus starter``: the small policy that runs begin with when no model is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.assembly.model import find_starter_folder
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.cli.output import json_option
from fleetbus_workers.starter.for_configuration import build_for_environment, check_new_folder


@click.command("starter")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--seed", default=0, metavar="N", help="Seed of conversations and training [0]")
@click.option("--vision", is_flag=True, help="Build a small vision model for the environment colours")
@click.option("--environment", "spec", metavar="SPEC", help="Build a policy for this environment (as for `up`)")
@click.option("--tasks", "location", metavar="FILE", help="Tasks of that environment; those that `up` holds out are not played")
@click.option(
    "--episodes", type=click.IntRange(16), default=2000, show_default=True, metavar="N", help="Episodes of random play"
)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with settings of that environment")
@json_option("the facts")
def command(
    folder: Path | None,
    seed: int,
    vision: bool,
    spec: str | None,
    location: str | None,
    episodes: int,
    config: Path | None,
    as_json: bool,
) -> None:
    """Print the path of the starter policy that comes with fleetbus, or build a new one into FOLDER.

    With --environment it is one for your own tools or texts: a small model that imitates random play in your environment,
    rewarded play more often, and has everything else to learn. Nothing has to be solved beforehand.

    Building takes minutes on one core and needs `pip install 'fleetbus[torch]'`. Use it with `fleetbus up --model FOLDER`.
    """
    if folder is None and (vision or spec or location):
        raise click.UsageError("name a FOLDER for the model that is built")
    if (spec is None) != (location is None) or (spec and vision):
        raise click.UsageError("--environment and --tasks belong together, and are not for --vision")
    if folder is None:
        _print_location(as_json)
        return
    report = _show_on_stderr if as_json else click.echo
    if spec and location:
        values = {"config": config, "run__environment": (spec,), "run__tasks": location}
        configuration = load_settings(values, earlier=False).configuration
        facts = build_for_environment(folder, configuration, episodes=episodes, seed=seed, report=report)
        how = f" --environment {spec} --tasks {location}"
    else:
        facts = _build(folder, seed, vision, report)
        how = " --environment colours --environment-images --tasks FILE" if vision else ""
    if as_json:
        print(json.dumps({"folder": str(folder), **facts}))
    else:
        print(f"built in {folder}; train it with `fleetbus up --model {folder}{how}`")


def _show_on_stderr(line: str) -> None:
    click.echo(line, err=True)


def _print_location(as_json: bool) -> None:
    print(json.dumps({"folder": str(find_starter_folder())}) if as_json else find_starter_folder())


def _build(folder: Path, seed: int, vision: bool, report: Callable[[str], None]) -> dict[str, object]:
    check_new_folder(folder)
    build: Callable[..., Any]
    try:
        if vision:
            from fleetbus_workers.starter.vision_starter import build_vision_starter

            build = build_vision_starter
        else:
            from fleetbus_workers.starter.build import build_starter

            build = build_starter
    except ModuleNotFoundError as error:
        extras = "torch,vision" if vision else "environment,torch"
        raise UserError(f"{error.name} is not installed: pip install 'fleetbus[{extras}]'") from error
    return msgspec.structs.asdict(build(folder, seed=seed, report=report))
