"""``fleetbus top [RUN]``: who works, what is learned, how full the log is, and what is stuck - live on a terminal."""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import click
import msgspec

from fleetbus.config.settings import Configuration
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.run_options import nats_http_option, reach_options, run_argument
from fleetbus_workers.cli.options import SECONDS, load_settings
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.command.exit_status import FINISHED, INTERRUPTED
from fleetbus_workers.command.terminal import open_console
from fleetbus_workers.command.terminal_keys import read_keys
from fleetbus_workers.run_access.log_access import build_driver, open_run
from fleetbus_workers.run_access.sources import build_address_resolver

REFRESH_SECONDS = 1.0
DRAW_SECONDS = 0.5
"""A worker is silent 4 s after its last heartbeat, and has to be seen as such within 5 s."""

FIRST_LOOK_SECONDS = 2.5
"""A heartbeat of every living worker comes within this."""


@click.command("top")
@run_argument
@click.option("--once", is_flag=True, help="Print the table once and exit")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON, one line per second (with --once: one)")
@click.option(
    "--stall", type=SECONDS, default=60.0, show_default=True, metavar="SECONDS", help="Report work as stalled after this time"
)
@nats_http_option
@reach_options
def command(run: str | None, once: bool, as_json: bool, stall: float, nats_http: str, **values: Any) -> int:
    """Show a live table of a run: workers and their last heartbeat, rates, reward, staleness, errors by class, the log.

    Works at 80 columns and over SSH. q or Ctrl-C ends it. Of a long log the newest entries are counted first, then all of it.
    --once reads all of it before it prints, and its exit status is 0: the run works or has ended; 1: it is stalled, with the
    reason; 2: bad input.
    """
    configuration = load_settings({**values, "run__name": run}).configuration
    address = build_address_resolver(configuration, nats_http)
    work = partial(_watch, configuration, once=once, as_json=as_json, stall_seconds=stall, nats_http=address)
    try:
        return run_async(work)
    except KeyboardInterrupt:
        return INTERRUPTED if once else FINISHED


async def _watch(
    configuration: Configuration, *, once: bool, as_json: bool, stall_seconds: float, nats_http: Callable[[], str | None]
) -> int:
    from fleetbus.logs.setup import suppress_logs
    from fleetbus_workers.observe.metrics.run_view import RunView
    from fleetbus_workers.observe.run.run_observer import RunObserver
    from fleetbus_workers.observe.run.state import RunState
    from fleetbus_workers.observe.run.watchdog import find_stalls
    from fleetbus_workers.observe.top.view import build_facts

    run = configuration.run.name
    async with open_run(configuration, "top", own_server=True) as bus, anyio.create_task_group() as tasks:
        with suppress_logs():
            state, driver = RunState(configuration.learner.steps), build_driver(configuration)
            policy = configuration.run.policy
            watch = RunObserver(bus, Subjects(run), state, driver, recent_first=not once, policy=policy)
            tasks.start_soon(watch.run)
            if not once:  # a server that takes its time must not hold up the picture of the workers
                tasks.start_soon(watch.follow_server_view, nats_http)

            async def look() -> dict[str, object]:
                server = await watch.fetch_server_view(nats_http) if once else watch.server
                now, now_ns = anyio.current_time(), bus.now_ns()
                is_behind, ending = watch.is_behind(now), watch.find_termination(now)
                stalls = (
                    []
                    if not watch.may_be_stuck(now)
                    else find_stalls(
                        watch.state,
                        watch.health,
                        now=now,
                        now_ns=now_ns,
                        admission=configuration.nats.admission,
                        stall_seconds=stall_seconds,
                    )
                )
                view = RunView(watch.state, watch.health, server, stalls, now, now_ns, ending)
                shown = build_facts(view, run=run, admission=configuration.nats.admission)
                return {"is_behind": is_behind} | shown

            result = await _show_once(look, as_json) if once else await _show(look, as_json)
        tasks.cancel_scope.cancel()
    return result


async def _show_once(look: Callable[[], Awaitable[dict[str, object]]], as_json: bool) -> int:
    """After reading the log up to now, and long enough to hear of every worker."""
    await anyio.sleep(FIRST_LOOK_SECONDS)
    shown = await look()
    while shown["is_behind"]:
        await anyio.sleep(REFRESH_SECONDS)
        shown = await look()
    _print(shown, as_json)
    return 1 if shown["stalls"] else FINISHED


async def _show(look: Callable[[], Awaitable[dict[str, object]]], as_json: bool) -> int:
    if as_json or not sys.stdout.isatty():
        while True:
            await anyio.sleep(REFRESH_SECONDS)
            _print(await look(), as_json)
    from rich.live import Live

    from fleetbus_workers.observe.top.view import screen

    with read_keys() as keys, Live("", console=open_console(), auto_refresh=False, screen=True) as live:
        while "q" not in keys().lower():
            live.update(screen(await look(), live.console), refresh=True)
            await anyio.sleep(DRAW_SECONDS)
    return FINISHED


def _print(shown: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(shown).decode(), flush=True)
        return
    from fleetbus_workers.observe.top.view import screen

    open_console().print(screen(shown))
