"""Commands that look at a run take its name as an argument, or as --run like the commands that work."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from fleetbus_workers.cli.look.run_options import run_argument, source_and_episode_arguments
from fleetbus_workers.cli.program import program


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


@click.command()
@source_and_episode_arguments
def read(source: str | None, episode: str | None) -> None:
    click.echo(f"{source} {episode}")


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "None None"),
        (("a", "e1"), "a e1"),
        (("--run", "a"), "a None"),
        (("--run", "a", "e1"), "a e1"),
        (("a", "--run", "a", "e1"), "a e1"),
        (("e1", "--run", "a"), "a e1"),
    ],
)
def test_an_episode_of_a_named_run_is_the_only_argument(arguments: tuple[str, ...], found: str) -> None:
    assert CliRunner().invoke(read, arguments).output.strip() == found


def test_two_runs_and_an_episode_are_refused() -> None:
    assert "two runs are named" in CliRunner().invoke(read, ["b", "e1", "--run", "a"]).output


LOOKING = ("sessions", "top", "monitor", "metrics", "evaluate", "audit", "episodes", "record", "trace", "cancel", "drain")


@pytest.mark.parametrize("name", LOOKING)
def test_every_command_about_a_run_takes_the_option(name: str) -> None:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    assert any("--run" in option.opts for option in command.params)
