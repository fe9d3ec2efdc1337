"""``fleetbus monitor [RUN]``: one web page about a run, on a port of this machine. It changes nothing without --actions."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import click

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.cli.look.run_options import nats_http_option, reach_options, run_argument
from fleetbus_workers.cli.options import load_settings
from fleetbus_workers.command.event_loop import call_on_signal, run_async
from fleetbus_workers.command.exit_status import FINISHED
from fleetbus_workers.run_access.log_access import build_driver, open_other_run, open_run
from fleetbus_workers.run_access.sources import build_address_resolver

DEFAULT_PORT = 8450


@click.command("monitor")
@run_argument
@click.option("--port", type=click.IntRange(0, 65_535), default=DEFAULT_PORT, metavar="N", help="Port; 0: any [8450]")
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on; other than loopback, no key is asked for without --key",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="Answer under this host name, too (of a proxy, for instance)")
@click.option(
    "--key/--no-key",
    "with_key",
    default=None,
    help="Ask for the key in the address that is printed (default: on loopback, which other users of the machine reach, too)",
)
@click.option(
    "--actions",
    is_flag=True,
    help="Let the page cancel and label episodes, drain workers, pause admission; only with a key and on loopback [read-only]",
)
@nats_http_option
@reach_options
def command(
    run: str | None,
    port: int,
    host: str,
    allow_host: tuple[str, ...],
    with_key: bool | None,
    actions: bool,
    nats_http: str,
    **values: Any,
) -> int:
    """Serve a web page about a run: workers, curves, groups, episodes token by token, the log.

    The page is live during the run; afterwards it shows the run's files. Ctrl-C ends the server. Needs
    `pip install 'fleetbus[monitor]'`; the page loads nothing from the internet.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'fleetbus[monitor]'") from error
    from fleetbus_workers.observe.monitor.access_key import generate_key
    from fleetbus_workers.serving.listeners import bind, is_loopback

    if actions and (with_key is False or not is_loopback(host)):
        raise UserError("--actions needs a key and an address of loopback: leave out --no-key and --host")
    configuration = load_settings({**values, "run__name": run}).configuration
    address = build_address_resolver(configuration, nats_http)
    key = generate_key() if with_key or (with_key is None and is_loopback(host)) else ""
    with bind(host, port) as bound:
        run_async(_serve, configuration, host, bound, address, allow_host, key, actions)
    return FINISHED


async def _serve(
    configuration: Configuration,
    host: str,
    bound: socket.socket,
    nats_http: Callable[[], str | None],
    allowed_hosts: tuple[str, ...],
    key: str,
    has_actions: bool,
) -> None:
    from fleetbus.logs.setup import configure_logs
    from fleetbus_workers.observe.monitor.serve import serve

    configure_logs(configuration.log, run=configuration.run.name, role="monitor")
    stop = anyio.Event()

    def on_ready(address: str) -> None:
        print(f"run {configuration.run.name}: {address}", flush=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_on_signal, stop.set)
        async with open_run(configuration, "monitor", own_server=True) as bus:
            driver = build_driver(configuration)
            await serve(
                bus,
                configuration,
                host=host,
                bound=bound,
                stop=stop,
                on_ready=on_ready,
                nats_http=nats_http,
                driver=driver,
                allowed_hosts=allowed_hosts,
                key=key,
                open_operator=partial(open_run, configuration, "cancel", own_server=True) if has_actions else None,
                open_other=partial(open_other_run, configuration),
                rejoins=not configuration.nats.url,
            )
        tasks.cancel_scope.cancel()
