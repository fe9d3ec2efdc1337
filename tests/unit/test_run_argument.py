"""Commands that look at a run take its name as an argument, or as --run like the commands that work."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from fleetbus_workers.cli.program import program
from fleetbus_workers.cli.run_options import run_argument


@click.command()
@run_argument
def shown(run: str | None) -> None:
    click.echo(run)


@pytest.mark.parametrize(
    ("arguments", "run"),
    [((), ""), (("a",), "a"), (("--run", "a"), "a"), (("a", "--run", "a"), "a"), (("--run", "a", "a"), "a")],
)
def test_a_run_is_named_in_either_way(arguments: tuple[str, ...], run: str) -> None:
    assert CliRunner().invoke(shown, arguments).output.strip() == run


def test_two_names_are_refused() -> None:
    assert "two runs are named" in CliRunner().invoke(shown, ["a", "--run", "b"]).output


@pytest.mark.parametrize("name", ["sessions", "top", "monitor", "metrics", "evaluate"])
def test_every_command_with_a_run_as_argument_takes_the_option_too(name: str) -> None:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    assert any("--run" in option.opts for option in command.params)
