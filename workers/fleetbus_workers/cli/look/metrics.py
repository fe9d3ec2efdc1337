"""``fleetbus metrics [RUN]``: a run's metrics for Prometheus, and per step to JSON lines or a tracker of experiments."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import click
from anyio.abc import TaskStatus

from fleetbus.config.load import flatten_configuration
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import nats_http_option, reach_options, run_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.command.event_loop import call_on_signal, run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.observe.sinks.base import Sink
from fleetbus_workers.observe.sinks.table import SINKS, open_sinks
from fleetbus_workers.run_access.log_access import build_driver, open_run
from fleetbus_workers.run_access.sources import build_address_resolver

DEFAULT_PORT = 9464
EVERY_SECONDS = 1.0
CLOSE_SECONDS = 60.0


_TAKES: dict[str, Any] = {
    "file": click.Path(path_type=Path, dir_okay=False),
    "folder": click.Path(path_type=Path, file_okay=False),
    "text": str,
}


def _sink_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for kind in reversed(SINKS):
        function = click.option(f"--{kind.name}", type=_TAKES[kind.takes], metavar=kind.metavar, help=kind.help)(function)
    return function


@click.command("metrics")
@run_argument
@click.option(
    "--port", type=click.IntRange(-1, 65_535), default=DEFAULT_PORT, metavar="N", help="Port; 0: any, -1: none [9464]"
)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Answer under this host name, too")
@_sink_options
@click.option("--until-finished", is_flag=True, help="End when the training has finished")
@nats_http_option
@reach_options
def command(run: str | None, port: int, until_finished: bool, **values: Any) -> int:
    """Export the metrics of a run until Ctrl-C: a dashboard for Grafana stands in docs/grafana/.

    Prometheus scrapes http://127.0.0.1:9464/metrics. Needs `pip install 'fleetbus[metrics]'`.
    """
    chosen = {name: values.pop(name) for name in ("host", "allow_host", "nats_http")}
    chosen["sinks"] = {kind.name: values.pop(kind.name) for kind in SINKS}
    configuration = load_settings({**values, "run__name": run}).configuration
    if port >= 0:
        try:
            import prometheus_client  # noqa: F401
        except ModuleNotFoundError as error:
            raise UserError("prometheus_client is not installed: pip install 'fleetbus[metrics]'") from error
    chosen["nats_http"] = build_address_resolver(configuration, chosen["nats_http"])
    work = partial(_export, configuration, port=port, until_finished=until_finished, **chosen)
    run_async(work)
    return FINISHED


async def _export(
    configuration: Configuration,
    *,
    port: int,
    host: str,
    allow_host: tuple[str, ...],
    sinks: Mapping[str, Any],
    nats_http: Callable[[], str | None],
    until_finished: bool,
) -> None:
    from fleetbus_workers.observe.metrics.collect import collect, iterate_evaluation_values, iterate_step_values
    from fleetbus_workers.observe.metrics.run_view import RunView
    from fleetbus_workers.observe.run.run_observer import RunObserver
    from fleetbus_workers.observe.run.state import RunState
    from fleetbus_workers.observe.run.watchdog import find_stalls

    run, state = configuration.run.name, RunState(configuration.learner.steps)
    opening = open_sinks(
        run=run, configuration=flatten_configuration(configuration), folder=run_folder(configuration.run).path, **sinks
    )
    async with open_run(configuration, "metrics", own_server=True) as bus, anyio.create_task_group() as tasks:
        await tasks.start(call_on_signal, tasks.cancel_scope.cancel)
        with ExitStack() as stack:
            publish = _start_exposition(stack, run, host, port, allow_host)
            kept = await tasks.start(_hold_sinks, opening)
            policy = configuration.run.policy
            watch = RunObserver(bus, Subjects(run), state, build_driver(configuration), policy=policy)
            tasks.start_soon(watch.run)
            written: set[tuple[str, int]] = set()
            evaluated: set[tuple[str, str]] = set()
            while True:
                await anyio.sleep(EVERY_SECONDS)
                server = await watch.fetch_server_view(nats_http)
                now, now_ns = anyio.current_time(), bus.now_ns()
                ending, may_be_stuck = watch.find_termination(now), watch.may_be_stuck(now)
                share = configuration.nats.admission
                stalls = find_stalls(state, watch.health, now=now, now_ns=now_ns, admission=share) if may_be_stuck else []
                publish(collect(RunView(state, watch.health, server, stalls, now, now_ns, ending)))
                for step, time_seconds, values in iterate_step_values(state, written):
                    await anyio.to_thread.run_sync(kept.write, step, time_seconds, values)
                for evaluation in iterate_evaluation_values(state, evaluated):
                    await anyio.to_thread.run_sync(kept.write, *evaluation)
                if until_finished and state.training.is_finished and not watch.is_behind(now):
                    break
        tasks.cancel_scope.cancel()


async def _hold_sinks(
    opening: AbstractContextManager[Sink], *, task_status: TaskStatus[Sink] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Keep sinks open until cancelled. They open and close in a thread, because W&B takes seconds for both."""
    sinks = await anyio.to_thread.run_sync(opening.__enter__)
    try:
        task_status.started(sinks)
        await anyio.sleep_forever()
    finally:
        with anyio.move_on_after(CLOSE_SECONDS, shield=True) as closing:
            await anyio.to_thread.run_sync(partial(opening.__exit__, None, None, None), abandon_on_cancel=True)
        if closing.cancelled_caught:
            print(f"fleetbus: some metrics were not sent within {CLOSE_SECONDS:g} s", file=sys.stderr)


def _start_exposition(stack: ExitStack, run: str, host: str, port: int, allowed_hosts: tuple[str, ...]) -> Any:
    if port < 0:
        return lambda samples: None
    from fleetbus_workers.observe.metrics.exposition import Exposition, serve_metrics

    exposition = Exposition(run)
    found = stack.enter_context(serve_metrics(exposition, host, port, allowed_hosts))
    print(f"run {run}: http://{host}:{found}/metrics", flush=True)
    return exposition.update
