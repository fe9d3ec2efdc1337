"""``fleetbus recipes``: what `up --recipe` trains."""

import click

from fleetbus_workers.command.exit_status import FINISHED


@click.command("recipes")
def command() -> int:
    """List the recipes: name, model, what is trained, and what was measured."""
    from fleetbus_workers.up.recipes import find_recipes_folder, format_recipes

    for line in format_recipes():
        click.echo(line)
    click.echo(f"train one: fleetbus up --recipe NAME   its page: {find_recipes_folder()}/NAME/README.md")
    return FINISHED
