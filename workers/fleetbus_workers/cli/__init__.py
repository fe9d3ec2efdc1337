"""The command line ``fleetbus``. Importing it is cheap: a command's module is imported when that command is called."""

import sys


def main() -> None:
    """Entry point of the console script; ends the process with the command's exit code."""
    from fleetbus_workers.cli.program import run_program

    sys.exit(run_program(sys.argv[1:]))
