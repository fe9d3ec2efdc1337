"""One role as one process: connect, work, and stop as requested.

A first SIGTERM or Ctrl-C drains: finish or hand back, then exit 0. A second one stops at once. A worker that was replaced by
another exits 0 too, so that a supervisor does not start it again; one whose log lost entries exits 1, so that it does. A
process that `fleetbus up` started also ends when `up` is gone, however that happened: see `fleetbus_workers.up.parent_death`.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import anyio
import click

from fleetbus.config.profile import TABLES, describe_profile
from fleetbus.config.settings import Configuration
from fleetbus.errors import BusClosed, BusError, LogLost, TakenOver, find_leaf, is_bad_input, iterate_leaves
from fleetbus_workers.assembly.work import Work, import_work, serve_role
from fleetbus_workers.cli.options import load_settings, validate_name
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import CRASHED, FINISHED, INTERRUPTED, REFUSED
from fleetbus_workers.run_access.server_address import generate_worker_name, resolve_server_url
from fleetbus_workers.up.parent_death import exit_with_parent

COLLECTOR_THRESHOLDS = (20_000, 20, 20)
"""New objects until the youngest are looked at, and so often until the older ones are."""


def role_options(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: what every role command takes besides settings."""
    name = click.option("--name", metavar="NAME", help="Name of this worker, unique in the run (default: generated)")
    supervised = click.option("--supervised", is_flag=True, hidden=True, help="Exit when standard input is closed")
    return name(supervised(function))


def run_role(
    role: str,
    load_work: Callable[[], Work],
    values: dict[str, Any],
    *,
    check: Callable[[Configuration], None] = lambda _: None,
) -> int:
    """Run a role until it is finished, drained or interrupted; the command's exit code. ``check`` is called before anything is
    imported or connected. Raises `UserError`."""
    configuration = load_fitted(role, values)
    url = ""

    async def serve(name: str, drain: anyio.Event) -> None:
        await serve_role(role, import_work(load_work), configuration, name, url, drain)

    def prepare() -> None:
        nonlocal url
        check(configuration)
        url = resolve_server_url(configuration)

    return run_process(role, values, configuration, serve, load_work, prepare=prepare)


def run_process(
    role: str,
    values: dict[str, Any],
    configuration: Configuration,
    serve: Callable[[str, anyio.Event], Awaitable[None]],
    load_work: Callable[[], Work],
    *,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """A process of a role around ``serve``, which gets the worker's name and the event that drains it. ``prepare`` refuses what
    can be refused before anything is imported. A JSON log holds every reason to end as one record: nothing is raised then."""
    import structlog

    from fleetbus.logs.setup import configure_logs
    from fleetbus.logs.uncaught import log_uncaught

    name = values.get("name") or generate_worker_name(role)
    validate_name("--name", name)
    if values.get("supervised"):
        exit_with_parent()
    configure_logs(configuration.log, run=configuration.run.name, role=role, worker=name)
    is_json, is_prepared = configuration.log.format == "json", False
    if is_json:
        log_uncaught()
    before = _listen_for_early_end()
    try:
        prepare()
        speaks = os.environ.get("RANK", "0") == "0"  # of several processes that share a model the first one
        if role in TABLES and speaks:
            structlog.get_logger().info(describe_profile(configuration, role))
        os.environ.setdefault("TQDM_DISABLE", "1")  # a bar for weights that are read in a second is noise in a log
        import_work(load_work)
        tune_collector()
        is_prepared = True
        status = run_async(_serve, serve, name, configuration.log.alive)
        if (role == "inference" and values.get("supervised")) or find_running_calls():
            _exit_at_once(status)
        return status
    except Exception as error:  # sorted by cause
        if not is_json and (is_bad_input(error) or not is_prepared):
            raise
        return log_end(error)
    except KeyboardInterrupt:  # before its work began, or after: in between signals drain it
        if not is_json:
            raise
        structlog.get_logger().warning("stopped: interrupted", reason="SIGINT")
        return INTERRUPTED
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _listen_for_early_end() -> Callable[[int, FrameType | None], Any] | int | None:
    """Let a SIGTERM that comes while the role is imported end the process as one that drains it, with a record: it has nothing
    to hand back. Returns what SIGTERM did before; None where this is no process of its own."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def end(number: int, frame: FrameType | None) -> None:
        """It ends here: code that is imported may catch whatever is raised."""
        import structlog

        with suppress(RuntimeError):  # from within another record that is being written
            structlog.get_logger().warning("stopped before its work began", reason="SIGTERM")
        _exit_at_once(FINISHED)

    return signal.signal(signal.SIGTERM, end)


def log_end(error: Exception) -> int:
    """Say in one record why a role ends, and return its exit code."""
    import structlog

    from fleetbus.logs.uncaught import describe

    log = structlog.get_logger()
    if is_bad_input(error):
        log.error("refused", reason=str(next(iterate_leaves(error))))
        return REFUSED
    if taken_over := find_leaf(error, TakenOver):
        log.warning("stopped for good: another worker has taken over", reason=str(taken_over))
        return FINISHED
    if lost := find_leaf(error, LogLost):
        log.error("stopped: the log lost entries; start again to go on from what is left", reason=str(lost))
        return CRASHED
    if (closed := find_leaf(error, BusClosed)) and all(isinstance(leaf, BusError) for leaf in iterate_leaves(error)):
        log.error("stopped: the connection is closed for good", reason=str(closed))
        return CRASHED
    log.error("crashed", reason=describe(error), exc_info=error)
    return CRASHED


def load_fitted(role: str, values: dict[str, Any]) -> Configuration:
    """The settings of a role as `up` would give them to it; under `up` all are given."""
    loaded = load_settings(values)
    if role not in TABLES:
        return loaded.configuration
    from fleetbus_workers.up.placement import find_gpus, find_memory
    from fleetbus_workers.up.profile import fit_role

    gpus = () if values.get("supervised") else find_gpus(os.environ)
    return fit_role(role, loaded.configuration, loaded.given, gpus, find_memory() if gpus and role == "inference" else 0)


THREAD_SECONDS = 1.0
"""How long threads may take to end after the event loop."""


def find_running_calls() -> list[str]:
    """Names of threads that would keep the interpreter from ending: in them code of an environment runs that was given up, and
    may run for ever. Its episode has ended or was handed back."""
    end = time.monotonic() + THREAD_SECONDS
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in threads:  # idle ones of the event loop end by themselves
        thread.join(max(end - time.monotonic(), 0.0))
    running = [thread.name for thread in threads if thread.is_alive()]
    if running:
        import structlog

        structlog.get_logger().warning("leaving calls that were given up and still run", count=len(running))
    return running


def _exit_at_once(status: int) -> NoReturn:
    """Everything is closed. What is left would keep `up` waiting: a thread that still imports torch or reads weights, or taking
    the interpreter apart with torch in it, which are seconds on a busy machine."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tune_collector() -> None:
    """Tune the garbage collector: what was imported stays to the end, and a few hundred new objects are no reason to look."""
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


async def _serve(serve: Callable[[str, anyio.Event], Awaitable[None]], name: str, alive: str) -> int:
    drain = anyio.Event()
    exit_code = FINISHED
    async with anyio.create_task_group() as tasks:

        async def stop_on_signals() -> None:
            nonlocal exit_code
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    if drain.is_set():
                        exit_code = INTERRUPTED
                        tasks.cancel_scope.cancel()
                        return
                    drain.set()

        tasks.start_soon(stop_on_signals)
        if alive:
            from fleetbus_workers.command.alive_file import touch_regularly

            tasks.start_soon(touch_regularly, Path(alive))
        await serve(name, drain)
        tasks.cancel_scope.cancel()
    return exit_code
