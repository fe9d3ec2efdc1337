"""The command `fleetbus up` around a `Run`: checks first, then the run's folder and lock, then the run, then the report."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from fleetbus.config.load import LoadedConfiguration, dump_configuration
from fleetbus.config.profile import apply_profile, describe_profile
from fleetbus.config.run_folder import RunFolder, read_earlier_configuration, run_folder
from fleetbus.config.seats import list_joined_policies, resolve_models
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus.files import create_folder, create_private_folder, replace_file
from fleetbus.logs.setup import configure_logs
from fleetbus.processors import multiplies_bfloat16
from fleetbus.tasks.datasets import is_remote
from fleetbus.tasks.datasets import redact_location as shown_location
from fleetbus.tasks.harbor import PREFIX as HARBOR
from fleetbus_workers.assembly.named_models import resolve_model
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, INTERRUPTED
from fleetbus_workers.observe.run.progress import Progress
from fleetbus_workers.up.checks import check_everything, check_writable
from fleetbus_workers.up.display import open_display
from fleetbus_workers.up.identity import build_identity, check_identity, write_identity
from fleetbus_workers.up.lock import lock_run
from fleetbus_workers.up.model_limits import fit_run
from fleetbus_workers.up.placement import find_cpu_memory, find_gpus, find_memory, place_roles
from fleetbus_workers.up.plan import build_plan, find_shape
from fleetbus_workers.up.process_plans import build_role_command
from fleetbus_workers.up.profile import fit_machine
from fleetbus_workers.up.reward_chart import draw_reward_chart
from fleetbus_workers.up.run import Run, RunResult, ServePage
from fleetbus_workers.up.seat_workers import describe_unserved_seats
from fleetbus_workers.up.summary_builder import Summary, is_summarized
from fleetbus_workers.up.summary_report import format_finished_report, format_report, load_summary, write_summary
from fleetbus_workers.up.supervisor import WorkerUnrecoverable
from fleetbus_workers.up.viewer_server import evict_viewers


def run_up(
    loaded: LoadedConfiguration,
    json_summary: Path | None,
    *,
    fresh: bool = False,
    plays: bool = True,
    page: ServePage | None = None,
) -> int:
    """Run everything until training is finished or the user stops it; returns the exit code. Raises `UserError`.

    With ``fresh`` what the run has so far is removed, once everything else has been checked. ``plays``: see `check_everything`.
    ``page`` is run beside it.
    """
    configuration, folder = check_run(loaded, fresh=fresh, plays=plays)
    if json_summary is not None:
        check_writable(json_summary.absolute().parent, flag="--json-summary")
    if fresh:
        _remove_run(folder, configuration.run.name)
    restarts = "learner.restart_from" in loaded.given and asks_to_restart(configuration, folder)
    if not restarts and _report_if_finished(configuration, folder, json_summary):
        return FINISHED
    with hold_run(configuration, folder):
        configure_logs(configuration.log, run=configuration.run.name, role="up")
        ending = run_async(_run, configuration, folder, page)
        return _report_result(ending, folder, json_summary)


def check_run(
    loaded: LoadedConfiguration, *, local_environment: bool = False, fresh: bool = False, plays: bool = False
) -> tuple[Configuration, RunFolder]:
    """The configuration with absolute paths, and the folder of the run. Raises `UserError` for anything that would keep it
    from working; nothing was started or written then. ``local_environment``: the environment is an object of the caller's.
    ``fresh``: what the run was before does not matter."""
    configuration = resolve_paths(loaded.configuration)
    folder = run_folder(configuration.run)
    if fresh or not folder.configuration.is_file():  # else it goes on with what it began with
        configuration = fit_run(configuration, loaded.given)
    configuration = fit_gpus(configuration, loaded.given)
    check_everything(configuration, local_environment=local_environment, fresh=fresh, plays=plays)
    if not fresh:
        check_identity(folder.identity, build_identity(configuration), loaded.given)
    return configuration, folder


def fit_gpus(configuration: Configuration, given: Mapping[str, str]) -> Configuration:
    """The configuration with what this machine's GPUs and the model call for, which is printed in one line. Raises `UserError`
    if the learner cannot fit on them."""
    gpus = find_gpus(os.environ)
    if not gpus or not configuration.run.model:
        return apply_profile(configuration, given, has_gpus=bool(gpus))
    memory, shape = find_memory(), find_shape(Path(configuration.run.model))
    configuration, chosen = fit_machine(configuration, given, gpus, memory, shape, cpu_memory=find_cpu_memory())
    _print_line(describe_profile(configuration))
    if chosen:
        _print_line(chosen)
    placement = place_roles(configuration, gpus)
    if shape is not None and memory and placement.decided:
        plan = build_plan(shape, configuration, placement, memory)
        plan.check()
        for line in plan.shortages:
            _print_line(f"may not fit: {line}; see `fleetbus plan`")
    return configuration


@contextmanager
def hold_run(configuration: Configuration, folder: RunFolder) -> Iterator[None]:
    """The run's folder, locked for the block. Raises `UserError` if it is held already."""
    create_private_folder(folder.path)  # it holds the settings, which may name secrets, and what was sampled
    create_folder(folder.logs)
    with lock_run(folder.lock, configuration.run.name):
        evict_viewers(folder)
        yield


def resolve_paths(configuration: Configuration) -> Configuration:
    """The same configuration for a process in any working folder."""
    run = configuration.run
    if run.model:
        run = msgspec.structs.replace(run, model=str(resolve_model(run.model)))
    seats = resolve_models(run.seats, lambda model: _make_absolute(str(resolve_model(model))))
    named = {key: getattr(run, key) for key in ("folder", "model", "tasks")}
    paths = {key: _make_absolute(path) for key, path in named.items() if path and not is_remote(path)}
    if run.tasks.startswith(HARBOR) and run.environment == RunSettings().environment:
        paths["environment"] = paths["tasks"]
    teacher = configuration.algorithm.teacher
    auth = str(Path(configuration.nats.auth).expanduser().absolute()) if configuration.nats.auth else ""
    return msgspec.structs.replace(
        configuration,
        run=msgspec.structs.replace(run, **paths, seats=seats),
        algorithm=msgspec.structs.replace(configuration.algorithm, teacher=_make_absolute(teacher) if teacher else ""),
        nats=msgspec.structs.replace(configuration.nats, auth=auth),
    )


def _make_absolute(path: str) -> str:
    prefix, place = (HARBOR, path.removeprefix(HARBOR)) if path.startswith(HARBOR) else ("", path)
    return prefix + str(Path(place).expanduser().absolute())


def _format_tasks(location: str) -> str:
    return shown_location(location) if is_remote(location) else str(format_path(Path(location)))


def format_opening_line(configuration: Configuration, folder: RunFolder) -> str:
    """The first line that a person sees."""
    run, learner = configuration.run, configuration.learner
    model = format_path(Path(run.model)) if run.model else "the starter policy"
    model += "".join(f", and another for the seat {policy}," for policy in list_joined_policies(run))
    tasks = f" with the tasks of {_format_tasks(run.tasks)}" if run.tasks else ""
    if not run.tasks and run.environment != RunSettings().environment:
        tasks = " with the warehouse tasks (yours: --tasks FILE)"
    verb = "resumes" if folder.store.exists() else "trains"
    environments = ", ".join(run.environment.split("\n"))
    return f"run {run.name} {verb} {model} on {environments}{tasks}, {learner.steps} steps ({format_path(folder.path)})"


def describe_float32(configuration: Configuration) -> list[str]:
    """A line where a precision of ``auto``, as recipes have it, is not what their times were measured with."""
    trainer = configuration.trainer
    if trainer.precision != "auto" or trainer.device != "cpu" or multiplies_bfloat16():
        return []
    return [
        "no instructions for bfloat16 (avx512_bf16, amx_bf16) on this processor: in float32 a step takes several times as long"
    ]


def format_path(path: Path) -> str:
    """``path`` as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def load_finished_summary(configuration: Configuration, folder: RunFolder) -> Summary | None:
    """The summary of a run that has all the steps that are asked for, else None; that of another run is in a copied folder."""
    summary = load_summary(folder)
    trained = list_joined_policies(configuration.run)
    if summary is None or summary.run != configuration.run.name or not summary.finished:
        return None
    if not summary.policies.keys() >= set(trained) or max(summary.steps, default=0) < configuration.learner.steps:
        return None
    return summary


def asks_to_restart(configuration: Configuration, folder: RunFolder) -> bool:
    """True if a run is to resume from an earlier checkpoint, and was not last started with the same wish."""
    wanted = configuration.learner.restart_from
    earlier = read_earlier_configuration(configuration.run) or {}
    before = earlier.get("learner")
    return bool(wanted) and (not isinstance(before, dict) or before.get("restart_from") != wanted)


def _report_if_finished(configuration: Configuration, folder: RunFolder, json_summary: Path | None) -> bool:
    summary = load_finished_summary(configuration, folder)
    if summary is None:
        return False
    if json_summary is not None:
        write_summary(summary, json_summary)
    for line in format_finished_report(summary, folder, format_path):
        _print_line(line)
    return True


def _remove_run(folder: RunFolder, run: str) -> None:
    """Everything of an earlier run of this name; raises `UserError` while it is being trained or served."""
    if not folder.path.exists():
        return
    if not any(path.exists() for path in (folder.identity, folder.configuration, folder.store)):
        raise UserError(f"{folder.path} holds no run: --fresh removes runs alone")
    with lock_run(folder.lock, run):
        evict_viewers(folder)
        shutil.rmtree(folder.path)


def record_start(configuration: Configuration, folder: RunFolder) -> None:
    """Write what the run is and how it was started. An `up` that is refused leaves both as they were: recordings and whoever
    looks at the run read its settings here."""
    write_identity(folder.identity, build_identity(configuration))
    replace_file(folder.configuration, dump_configuration(configuration))


async def _run(configuration: Configuration, folder: RunFolder, page: ServePage | None) -> RunResult:
    progress = Progress(configuration.learner.steps, keeps=is_summarized, evaluation_episodes=configuration.evaluation.episodes)
    async with open_display(progress) as display:
        display.line(format_opening_line(configuration, folder))
        for line in (*describe_float32(configuration), *describe_unserved_seats(configuration)):
            display.line(line)
        command, record = build_role_command(folder.configuration), partial(record_start, configuration, folder)
        run = Run(configuration, folder, command=command, record_start=record, display=display, page=page)
        return await run.run(progress)


def _report_result(ending: RunResult, folder: RunFolder, json_summary: Path | None) -> int:
    if ending.summary is not None:
        write_summary(ending.summary, folder.summary, *([json_summary] if json_summary else []))
        if not draw_chart_if_possible(ending.summary, folder):
            _print_line("reward chart not drawn; to enable it: pip install 'fleetbus[plot]'")
        for line in format_report(ending.summary, folder, format_path):
            _print_line(line)
    if ending.failure is not None:
        _report_failure(ending, folder)
        return CRASHED
    return INTERRUPTED if ending.signal == signal.SIGINT else FINISHED


def draw_chart_if_possible(summary: Summary, folder: RunFolder) -> bool:
    """Draw the reward chart; False without matplotlib."""
    try:
        draw_reward_chart(summary, folder.picture)
    except ModuleNotFoundError:
        return False
    return True


def _report_failure(ending: RunResult, folder: RunFolder) -> None:
    """The failure in one line, after the last log lines of the process that failed."""
    if isinstance(ending.failure, WorkerUnrecoverable):
        for line in ending.failure.tail:
            print(f"  | {line}", file=sys.stderr)  # noqa: T201
    print(f"fleetbus: {ending.failure}; its log is in {format_path(folder.logs)}", file=sys.stderr)  # noqa: T201


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201
