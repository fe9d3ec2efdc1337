"""The command line ``fleetbus``. Importing it is cheap: a command's module is imported when that command is called."""

import os
import sys

from fleetbus_workers.command.exit_status import INTERRUPTED


def main() -> None:
    """Entry point of the console script; ends the process with the command's exit code."""
    _open_standard_streams()
    try:
        from fleetbus_workers.cli.program import run_program
    except KeyboardInterrupt:  # Ctrl-C while modules are imported
        sys.exit(INTERRUPTED)
    sys.exit(run_program(sys.argv[1:]))


def _open_standard_streams() -> None:
    """Open what was closed (``>&-``) as the null device: else the first socket gets its number, and uvloop aborts at that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
