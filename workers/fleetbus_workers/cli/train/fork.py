"""``fleetbus fork``: a new run that begins with the weights and the optimizer of a checkpoint of another one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from fleetbus.config.load import read_tables
from fleetbus.config.run_folder import RunFolder, policy_folder_below
from fleetbus.config.seats import list_joined_policies
from fleetbus.config.settings import RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.cli.look.runs import folder_options, runs_folder
from fleetbus_workers.cli.options import validate_name
from fleetbus_workers.command.exit_status import FINISHED

ORIGIN = "origin"
"""In the new run's folder a copy of the checkpoint: the other run prunes its own. That of the policy of a trained seat is in
the policy's folder (`fleetbus.config.seats.configure_learner`, docs/decisions/0253-up-of-several-learners.md)."""


@click.command("fork")
@click.argument("run")
@click.option("--at", "step", type=click.IntRange(1), metavar="STEP", help="A step that has a checkpoint [the newest]")
@click.option("--run", "new", required=True, metavar="NAME", help="Name of the new run")
@folder_options
def command(run: str, step: int | None, new: str, **values: Any) -> int:
    """Make a new run that begins with the weights and the optimizer of RUN at a step, and with its settings.

    Nothing is started: `fleetbus up --run NAME` does that, with other settings where they are given. The new run has a log of
    its own and counts its steps from 0; where it began is a setting of its learner, which its log keeps (learner.begin_with).
    """
    for name in (run, new):
        validate_name("run", name)
    folder = runs_folder(values)
    origin, target = RunFolder(folder / run), RunFolder(folder / new)
    if not origin.configuration.is_file():
        raise UserError(f"{origin.path} holds no run that `fleetbus up` has started")
    if target.path.exists():
        raise UserError(f"{target.path} exists already: choose another name, or remove it (fleetbus runs rm {new})")
    tables = read_tables(origin.configuration)
    checkpoint, found = find_checkpoint(origin, step)
    others = {policy: find_checkpoint_of(origin, policy, found) for policy in list_policies_of_seats(tables)}
    partial = Path(tempfile.mkdtemp(prefix=f".{new}.", dir=folder))
    try:
        copy_checkpoint(checkpoint, partial / ORIGIN)
        for policy, of_policy in others.items():
            copy_checkpoint(of_policy, policy_folder_below(RunFolder(partial), policy).path / ORIGIN)
        tables = change_tables(tables, new, target.path / ORIGIN)
        (partial / target.configuration.name).write_text(json.dumps(tables, indent=2) + "\n")
        partial.rename(target.path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    click.echo(f"run {new} begins with step {found} of {run}; start it with: fleetbus up --run {new}")
    return FINISHED


def find_checkpoint(origin: RunFolder, step: int | None) -> tuple[Path, int]:
    """The newest checkpoint of a step (None: of any) of the newest lineage that has one, and its step. Raises `UserError`."""
    from fleetbus_workers.learner.checkpoints import list_checkpoints

    written = [(lineage, of_step) for lineage, of_step, is_finished in list_checkpoints(origin.checkpoints) if is_finished]
    if not written:
        raise UserError(f"{origin.checkpoints} contains no checkpoint: wait for the first (learner.checkpoint_every)")
    wanted = [(lineage, of_step) for lineage, of_step in written if step in (None, of_step)]
    if not wanted:
        steps = ", ".join(map(str, sorted({of_step for _, of_step in written})))
        raise UserError(f"--at {step}: that step has no checkpoint; choose from: {steps}")
    lineage, found = max(wanted)
    return origin.checkpoints / f"l{lineage}-{found:06d}", found


def list_policies_of_seats(tables: dict[str, Any]) -> list[str]:
    """The policies that learners of their own train in a run with these settings."""
    seats = tables.get("run", {}).get("seats", "")
    run = RunSettings(seats=seats if isinstance(seats, str) else "\n".join(map(str, seats)))
    return list(list_joined_policies(run))


def find_checkpoint_of(origin: RunFolder, policy: str, step: int) -> Path:
    """The checkpoint of the policy of a trained seat at the step that the run's own policy begins with. Raises `UserError`."""
    try:
        return find_checkpoint(policy_folder_below(origin, policy), step)[0]
    except UserError as error:
        raise UserError(f"the policy {policy} of a trained seat has to begin at step {step}, too: {error}") from error


def copy_checkpoint(checkpoint: Path, target: Path) -> None:
    """Link its files, which never change, or copy them; and read them once more. Raises `UserError` if it is not whole."""
    from fleetbus_workers.learner.checkpoints import CheckpointDamaged, open_checkpoint

    def link(source: str, name: str) -> None:
        with suppress(OSError):
            os.link(source, name)
            return
        shutil.copyfile(source, name)

    try:
        shutil.copytree(checkpoint, target, copy_function=link)
        open_checkpoint(target)
    except CheckpointDamaged as damaged:
        raise UserError(f"{checkpoint} is no whole checkpoint: {damaged}; choose another step") from damaged
    except (OSError, shutil.Error) as error:
        raise UserError(f"cannot copy {checkpoint}: {error}; if its run is being trained, repeat the command") from error


def change_tables(tables: dict[str, Any], new: str, origin: Path) -> dict[str, Any]:
    """The settings of the run, as the new one has them."""
    changes = {"run": {"name": new}, "learner": {"begin_with": str(origin.absolute()), "restart_from": ""}}
    return tables | {table: {**tables.get(table, {}), **changed} for table, changed in changes.items()}
