"""The program: which commands there are, and how every way of ending becomes one exit code and at most one line.

0 finished or drained · 1 crashed (with a traceback) · 2 bad input, or a package is missing (one line, no traceback) ·
130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from fleetbus.errors import BusClosed, is_bad_input, is_disk_full, iterate_leaves
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, INTERRUPTED, REFUSED
from fleetbus_workers.command.terminal import escape_output

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_PATH_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Of a path that was given, or lies below one: no mistake of the program."""


class Entry(NamedTuple):
    """A command that is not imported yet: ``module``, below this package, has a `click.Command` called ``command``."""

    section: str
    module: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "up": Entry("Train", "train.up", "Train on this machine with all it needs: default task, or yours"),
    "recipes": Entry("Train", "train.recipes", "List what `up --recipe` trains, and what was measured"),
    "environment": Entry("One role", "roles.environment", "An environment worker: plays episodes"),
    "inference": Entry("One role", "roles.inference", "An inference worker: samples the policy"),
    "learner": Entry("One role", "roles.learner", "The learner: requests episodes and trains"),
    "evaluate": Entry("Train", "train.evaluate", "Play held-out tasks with a run's policy: pass@k, per environment"),
    "fork": Entry("Train", "train.fork", "Make a run that begins with a checkpoint of another"),
    "learn": Entry("Train", "train.learn", "Fine-tune a model on the rewarded episodes of recordings"),
    "plan": Entry("Train", "train.plan", "What a model needs of each GPU, before anything starts"),
    "recorder": Entry("One role", "roles.recorder", "The recorder: archives the log and keeps it below its limit"),
    "gateway": Entry("One role", "roles.gateway", "Environments for other trainers, episodes for agents"),
    "init": Entry("Set up", "setup.init", "Declare a run's streams on a NATS server"),
    "restore": Entry("Set up", "setup.restore", "Store a lost log anew, from its archive"),
    "auth": Entry("Set up", "setup.auth", "Keys per role, TLS and a server configuration with least rights"),
    "tasks": Entry("Set up", "setup.tasks", "Check tasks, and split them into training and held-out ones"),
    "check": Entry("Set up", "setup.check", "Play an episode of your environment and check what it returns"),
    "probe": Entry("Set up", "setup.probe", "Try to be paid by your grader without solving the task"),
    "new": Entry("Set up", "setup.new", "Create a working environment with its test"),
    "starter": Entry("Set up", "setup.starter", "Build the starter policy, or say where it is"),
    "top": Entry("Look", "look.top", "A run as a live table: workers, rates, reward, what is stuck"),
    "metrics": Entry("Look", "look.metrics", "A run's metrics for Prometheus, JSON lines, TensorBoard or W&B"),
    "trace": Entry("Look", "look.trace", "Episodes as OpenTelemetry traces, derived from the log"),
    "sessions": Entry("Look", "look.sessions", "What every worker holds right now, oldest first"),
    "runs": Entry("Look", "look.runs", "The runs on this machine, or on a server: list them, remove them"),
    "monitor": Entry("Look", "look.monitor", "A web page about a run: workers, curves, groups, episodes"),
    "bundle": Entry("Look", "look.bundle", "A copy of a run's page as a folder: opens without fleetbus"),
    "agents": Entry("Look", "look.agents", "Agents with their own loops that were tried, and what they need"),
    "doctor": Entry("Look", "look.doctor", "Check whether this machine is ready"),
    "audit": Entry("Look", "look.audit", "Check from its log that every episode of a run is accounted for"),
    "diagnose": Entry("Look", "look.diagnose", "Say why a run learns or does not, since which step, and what to do"),
    "compare": Entry("Look", "look.compare", "Compare two evaluations task by task, with intervals"),
    "usage": Entry("Look", "look.usage", "Tokens, calls and hours of a run, by what became of them"),
    "record": Entry("Replay", "replay.record", "Export the log of a run as one file"),
    "episodes": Entry("Replay", "look.episodes", "List, filter and read the episodes of a run or a recording"),
    "import": Entry("Replay", "replay.import_file", "Import ATIF trajectories or an Inspect log as a recording"),
    "replay": Entry("Replay", "replay.replay", "Play a recording against one worker and compare what it publishes"),
    "regrade": Entry("Replay", "replay.regrade", "Grade recorded episodes by another verifier, and list what changes"),
    "cancel": Entry("Act", "operate.cancel", "End episodes as cancelled, wherever they run"),
    "drain": Entry("Act", "operate.drain", "Let workers finish or hand back what they have, and stop"),
    "pause": Entry("Act", "operate.pause", "Let the learner request no new episodes, until it is resumed"),
    "label": Entry("Act", "operate.label", "Label an episode, or comment on it, in the run's log"),
    "completion": Entry("Set up", "setup.completion", "Complete commands and flags in bash, zsh or fish"),
    "schema": Entry("Look", "look.schema", "JSON Schema of every message"),
}


class LazyGroup(click.Group):
    """A group that knows its commands by `COMMANDS` and imports only the one that is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"fleetbus_workers.cli.{COMMANDS[name].module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = arguments[0]
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "the commands are " + ", ".join(COMMANDS)
            raise click.UsageError(f"no command {name!r}; {hint}")
        return super().resolve_command(context, arguments)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands by their summaries: completing a name imports no command."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=entry.summary) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, context, incomplete)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            rows = [(name, entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="fleetbus", message="%(prog)s %(version)s")
def program() -> None:
    """Reinforcement learning of LLM agents on remote environments, over one durable NATS log."""


def run_program(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. What it prints holds no control characters of foreign text."""
    with escape_output():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        result = program.main(args=list(arguments), prog_name="fleetbus", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return REFUSED
    except click.UsageError as error:
        where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        return _report_refusal(error.format_message().rstrip(".") + where)
    except click.ClickException as error:
        return _report_refusal(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost: reported as a refusal or a crash
        return _report(error)
    return result if isinstance(result, int) else FINISHED


def _report(error: Exception) -> int:
    """Bad input is one line; anything else is a crash and shows where it happened, except a closed output pipe."""
    if is_bad_input(error):
        return _report_refusal(str(next(iterate_leaves(error))))
    leaves = list(iterate_leaves(error))
    if any(isinstance(leaf, FileNotFoundError) for leaf in leaves) and not _has_working_folder():
        return _report_refusal("the folder that this was started in was removed: change to another one")
    if all(isinstance(leaf, BrokenPipeError) for leaf in leaves):
        return _close_stdout()
    if large := next((leaf for leaf in leaves if isinstance(leaf, OSError) and leaf.errno == errno.EFBIG), None):
        _report_refusal(f"a file is larger than allowed here: {large}: write to another place, or raise the limit (ulimit -f)")
        return CRASHED
    if full := next((leaf for leaf in leaves if is_disk_full(leaf)), None):
        _report_refusal(f"the disk is full: {full}: free space, then repeat the command")
        return CRASHED
    if all(isinstance(leaf, OSError) and leaf.filename and leaf.errno in _PATH_ERRORS for leaf in leaves):
        return _report_refusal(f"{leaves[0]}: choose another path, or correct what is there")
    if all(isinstance(leaf, BusClosed) for leaf in leaves):
        _report_refusal(f"the connection is closed for good: {leaves[0]}")
        return CRASHED
    if missing := next((leaf for leaf in leaves if isinstance(leaf, ModuleNotFoundError)), None):
        from fleetbus_workers.cli.look.diagnosis import CPU_BUILD
        from fleetbus_workers.cli.missing_packages import find_extra

        if extra := find_extra(missing.name or ""):
            note = f"; {CPU_BUILD}" if missing.name == "torch" else ""
            return _report_refusal(f"this needs the package {missing.name}: pip install 'fleetbus[{extra}]'{note}")
    traceback.print_exception(error, file=sys.stderr)
    return CRASHED


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _report_refusal(reason: str) -> int:
    print(f"fleetbus: {' '.join(reason.split())}", file=sys.stderr)
    return REFUSED


def _close_stdout() -> int:
    """The reader closed the pipe (``fleetbus schema | head``): the interpreter's last flush must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CRASHED
