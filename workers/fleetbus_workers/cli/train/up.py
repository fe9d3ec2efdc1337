"""``fleetbus up``: everything on this machine."""

from pathlib import Path
from typing import Any

import click
import msgspec

from fleetbus_workers.cli.options import SettingsCommand, load_settings, settings_options

STARTER_EPISODES = 2000
"""Of random play that the starter policy of a recipe imitates."""


@click.command("up", cls=SettingsCommand)
@click.option(
    "--json-summary", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Also write the summary to FILE"
)
@click.option("--recipe", metavar="NAME", help="A recipe (`fleetbus recipes`), or a folder like one")
@click.option("--fresh", is_flag=True, help="Remove what the run of this name has so far, and begin anew")
@click.option("--check/--no-check", default=True, help="First play an episode of your environment class, for a second at most")
@click.option("--monitor/--no-monitor", default=True, help="Serve a web page about the run while it runs, on loopback")
@settings_options(
    "run", "nats", "learner", "algorithm", "trainer", "tinker", "weights", "environment", "inference", "episode", "evaluation",
    "reward", "limits", "container", "fleet", "log",
)  # fmt: skip
def command(json_summary: Path | None, recipe: str | None, fresh: bool, check: bool, monitor: bool, **values: Any) -> int:
    """Train on this machine: start a NATS server, environment and inference workers, and the learner.

    Trains the starter policy on the warehouse tasks, or yours: --model PATH --tasks FILE --environment SPEC, or what a recipe
    has: --recipe NAME. Ctrl-C stops the run cleanly; the same command resumes it. transformers' from_pretrained loads the model
    folder of a finished run.
    """
    from fleetbus_workers.cli.train.up_page import serve_page
    from fleetbus_workers.up.command import run_up

    loaded = load_settings(values, earlier=not fresh, recipe=_read_recipe(recipe, values))
    return run_up(loaded, json_summary, fresh=fresh, plays=check, page=serve_page if monitor else None)


def _read_recipe(name: str | None, values: dict[str, Any]) -> dict[str, object] | None:
    """The tables of a recipe; the starter policy that it asks for is built first, once, unless a model was named."""
    if name is None:
        return None
    from fleetbus_workers.starter.for_configuration import build_for_environment
    from fleetbus_workers.up.recipes import find_recipe

    recipe = find_recipe(name)
    tables = recipe.build_tables()
    if not recipe.about.starter or values.get("run__model"):
        return tables
    configuration = load_settings({}, earlier=False, recipe=tables).configuration
    tasks = Path(configuration.run.tasks)
    folder = tasks.with_name(f"{tasks.stem}-starter")
    if not (folder / "config.json").is_file():
        click.echo(f"building a starter policy for recipe {recipe.name}, once, into {folder}: some minutes")
        build_for_environment(folder, configuration, episodes=STARTER_EPISODES, seed=0, report=click.echo)
    return {**tables, "run": {**msgspec.convert(tables["run"], dict[str, Any]), "model": str(folder)}}
