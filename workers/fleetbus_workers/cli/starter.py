"""``fleetbus starter``: the small policy that runs begin with when no model is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


@click.command("starter")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--seed", default=0, metavar="N", help="Seed of conversations and training [0]")
@click.option("--vision", is_flag=True, help="Build a small vision model for the environment colours")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON")
def command(folder: Path | None, seed: int, vision: bool, as_json: bool) -> None:
    """Print the path of the starter policy that comes with fleetbus, or build a new one into FOLDER.

    Building takes minutes on one core and needs `pip install 'fleetbus[torch]'`. Use it with `fleetbus up --model FOLDER`.
    """
    if folder is None and vision:
        raise click.UsageError("--vision needs a FOLDER: no model that sees is shipped")
    if folder is None:
        _print_location(as_json)
    else:
        _build(folder, seed, vision, as_json)


def _print_location(as_json: bool) -> None:
    from fleetbus_workers.assembly.model import find_starter_folder

    print(json.dumps({"folder": str(find_starter_folder())}) if as_json else find_starter_folder())


def _build(folder: Path, seed: int, vision: bool, as_json: bool) -> None:
    import msgspec

    from fleetbus.errors import UserError

    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a new folder")
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
    report = build(folder, seed=seed, report=lambda line: click.echo(line, err=as_json))
    if as_json:
        print(json.dumps({"folder": str(folder), **msgspec.structs.asdict(report)}))
    else:
        how = " --environment colours --environment-images --tasks FILE" if vision else ""
        print(f"built in {folder}; train it with `fleetbus up --model {folder}{how}`")
