"""``fleetbus completion SHELL``: the script that completes commands and flags in a shell."""

import click
from click.shell_completion import get_completion_class

from fleetbus_workers.cli.program import program
from fleetbus_workers.command.exit_status import FINISHED


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell: `eval "$(fleetbus completion bash)"`, in ~/.bashrc for all sessions.

    fish: `fleetbus completion fish > ~/.config/fish/completions/fleetbus.fish`.
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    print(kind(program, {}, "fleetbus", "_FLEETBUS_COMPLETE").source())
    return FINISHED
