"""``fleetbus inference --serve``: one inference worker for several runs, each with settings and a key of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec

from fleetbus.config.load import read_tables
from fleetbus.config.served_runs import ServedSpec, parse_served
from fleetbus.config.settings import Configuration
from fleetbus.delivery.fair_shares import Share
from fleetbus.errors import UserError
from fleetbus_workers.assembly.shared_inference import ServedRun, serve_part, serve_runs
from fleetbus_workers.cli.roles.role import load_fitted
from fleetbus_workers.run_access.server_address import resolve_server_url

FILES = (".toml", ".json")


def load_served(values: dict[str, Any], items: tuple[str, ...]) -> list[ServedRun]:
    """The runs to serve. What was given on the command line holds for all of them, but for what a run's own file says. Raises
    `UserError`."""
    if values.get("run__name"):
        raise UserError("--run and --serve: name every run that is to be served with --serve, and leave out --run")
    specs = [parse_served(item) for item in items]
    loaded = [(spec, _load(values, spec)) for spec in specs]
    twice = [name for name, count in Counter(each.run.name for _, each in loaded).items() if count > 1]
    if twice:
        raise UserError(f"--serve names the run {twice[0]} twice: give each run one --serve")
    return [
        ServedRun(
            configuration=configuration,
            url=resolve_server_url(configuration),
            share=Share(weight=spec.weight, quota=spec.quota),
        )
        for spec, configuration in loaded
    ]


def _load(values: dict[str, Any], spec: ServedSpec) -> Configuration:
    if not spec.run.endswith(FILES):
        return load_fitted("inference", {**values, "run__name": spec.run})
    file = Path(spec.run)
    tables = read_tables(file)
    run = tables.get("run")
    if not isinstance(run, dict) or not run.get("name"):
        raise UserError(f"--serve {spec.run}: the file names no run; give it a [run] table with a name")
    own = {f"{table}__{key}" for table, settings in tables.items() if isinstance(settings, dict) for key in settings}
    return load_fitted("inference", {key: value for key, value in values.items() if key not in own} | {"config": file})


async def serve_all(runs: list[ServedRun], name: str, slots: int, drain: anyio.Event) -> None:
    """The parts of all runs, each with as many slots as there are in all; the slots are shared."""
    from fleetbus_workers.assembly.inference_work import work

    await serve_runs([_with_slots(run, slots) for run in runs], serve_part(work, name), slots=slots, drain=drain)


def _with_slots(run: ServedRun, slots: int) -> ServedRun:
    settings = msgspec.structs.replace(run.configuration.inference, slots=slots)
    return msgspec.structs.replace(run, configuration=msgspec.structs.replace(run.configuration, inference=settings))
