"""``fleetbus gateway``: environments of the bus behind the protocols of other trainers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import click

from fleetbus.errors import UserError
from fleetbus_schemas import Heartbeat, Subjects
from fleetbus_workers.assembly.work import Work
from fleetbus_workers.cli.options import SECONDS, SECONDS_OR_NONE, SettingsCommand, settings_options
from fleetbus_workers.cli.roles.role import role_options, run_role
from fleetbus_workers.run_access.server_address import resolve_server_url
from fleetbus_workers.weights.store import get_image_store

if TYPE_CHECKING:
    from fleetbus.bus.base import Bus
    from fleetbus.client.sessions import SessionClient
    from fleetbus.config.settings import Configuration
    from fleetbus_workers.gateway.images import LoadImage
    from fleetbus_workers.serving.browser_guard import GuardSettings

    Entered = Callable[[], AbstractAsyncContextManager[SessionClient]]
    BuildLoader = Callable[[SessionClient], LoadImage | None]


def listen_options(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: where to listen, and the options of `_build_guard`."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on"),
        click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on"),
        click.option("--allow-host", multiple=True, metavar="NAME", help="Answer under this host name, too (of a proxy)"),
        click.option("--allow-origin", multiple=True, metavar="URL", help="Let pages of this origin call, as https://my.page"),
    )
    for option in reversed(options):
        function = option(function)
    return function


def in_process_option(function: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: the option of `_build_gateway_work`."""
    text = "Run the environments that --environment names in this process: faster on one machine"
    return click.option("--in-process", is_flag=True, help=text)(function)


def _build_guard(host: str, values: dict[str, Any], refusal: str) -> GuardSettings:
    """The settings that keep pages of other origins out; raises `UserError` with a ``refusal`` beyond loopback."""
    from fleetbus_workers.serving.browser_guard import build_guard_settings
    from fleetbus_workers.serving.listeners import is_loopback

    if refusal and not is_loopback(host):
        raise UserError(f"--host {host} is reachable from other machines{refusal}")
    return build_guard_settings(host, values.pop("allow_host"), values.pop("allow_origin"))


@click.group("gateway")
def command() -> None:
    """Serve the environments of a run over the protocols of other trainers, to their unmodified clients."""


@command.command("gym", cls=SettingsCommand, short_help="The remote-gym protocol (multipart over HTTP)")
@listen_options
@click.option(
    "--max-inflight", envvar="GYM_MAX_INFLIGHT", type=click.IntRange(0), default=0, help="Concurrent calls; 0: no limit"
)
@click.option(
    "--admit-timeout",
    envvar="GYM_ADMIT_TIMEOUT",
    type=SECONDS_OR_NONE,
    default=5.0,
    help="Seconds a call waits for its turn",
)
@click.option(
    "--max-sessions", type=click.IntRange(0), default=0, help="Concurrent sessions; 0: as many as the workers have slots"
)
@click.option("--session-timeout", type=SECONDS, default=3600.0, help="Seconds without a call until a session is closed")
@click.option("--image-format", envvar="GYM_IMAGE_FORMAT", default="PNG", show_default=True, help="PNG, JPEG, WEBP, ...")
@click.option("--image-mime", envvar="GYM_IMAGE_MIME", default="", help="Media type of images (default: that of the format)")
@click.option("--image-quality", type=click.IntRange(0, 100), default=0, help="For JPEG and WEBP; 0: Pillow's default")
@in_process_option
@role_options
@settings_options("run", "nats", "environment", "reward", "fleet", "container", "limits", "log")
def gym(host: str, port: int, **values: Any) -> int:
    """Serve the remote-gym protocol (multipart over HTTP) to GymImageEnvClient and similar clients.

    A client's retries are executed once, even if a worker, gateway or connection fails in between. If the variable
    GYM_API_KEY is set, clients have to send its value.
    """
    names = ("max_inflight", "admit_timeout", "max_sessions", "session_timeout")
    given = {name: values.pop(name) for name in names} | {"api_key": os.environ.get("GYM_API_KEY", "")}
    refusal = "" if given["api_key"] else ": set GYM_API_KEY to the key that clients have to send"
    given["guard"] = _build_guard(host, values, refusal)
    in_process = values.pop("in_process")
    image = [values.pop(f"image_{name}") for name in ("format", "mime", "quality")]
    return run_role("gateway", partial(_load_gym, host, port, given, image, in_process), values)


@command.command("openenv", cls=SettingsCommand, short_help="The OpenEnv protocol (WebSocket)")
@listen_options
@click.option(
    "--capacity-timeout", type=SECONDS_OR_NONE, default=30.0, show_default=True, help="Seconds a reset waits for a slot"
)
@click.option("--session-timeout", type=SECONDS, default=1800.0, help="Seconds without a call until a named session is closed")
@click.option("--resume-timeout", type=SECONDS, default=60.0, help="Seconds a named session waits for its client to reconnect")
@click.option("--open-to-others", is_flag=True, help="Allow a --host beyond this machine without OPENENV_TOKEN")
@in_process_option
@role_options
@settings_options("run", "nats", "environment", "reward", "fleet", "container", "limits", "log")
def openenv(host: str, port: int, open_to_others: bool, **values: Any) -> int:
    """Serve the OpenEnv protocol (WebSocket /ws) to EnvClient and similar clients.

    At capacity a reset waits instead of failing; an invalid action has no effect; a disconnected client frees its slot. With
    the base URL http://HOST:PORT/sessions/NAME an episode outlives connections and the gateway. If the variable
    OPENENV_TOKEN is set, clients have to send its value: EnvClient(headers={"Authorization": "Bearer ..."}).
    """
    given = {name: values.pop(name) for name in ("capacity_timeout", "session_timeout", "resume_timeout")}
    in_process = values.pop("in_process")
    given["token"] = os.environ.get("OPENENV_TOKEN", "")
    wanted = " without a token: set OPENENV_TOKEN to the token that clients have to send, or add --open-to-others to allow it"
    given["guard"] = _build_guard(host, values, "" if given["token"] or open_to_others else wanted)
    return run_role("gateway", partial(_load_openenv, host, port, given, in_process), values)


@command.command("agents", cls=SettingsCommand, short_help="The run's episodes, for agents that run elsewhere")
@listen_options
@click.option("--public-url", default="", metavar="URL", help="How agents reach this gateway (default: http://HOST:PORT)")
@role_options
@settings_options("run", "nats", "environment", "limits", "log")
def agents(host: str, port: int, public_url: str, **values: object) -> int:
    """Give the run's episodes to agents that run elsewhere, and serve their model calls (OpenAI's and Anthropic's protocols).

    It takes the place of the run's environment workers: --environment-slots agents may play at a time. If the variable
    AGENTS_TOKEN is set, its value is needed to open sessions: 24 random characters or more. Gateways of one run need the same.
    """
    token = os.environ.get("AGENTS_TOKEN", "")
    guard = _build_guard(host, values, "" if token else ": set AGENTS_TOKEN to the token that opens sessions")
    return run_role("environment", partial(_load_agents, host, port, public_url.rstrip("/"), token, guard), values)


def _load_agents(host: str, port: int, public_url: str, token: str, guard: GuardSettings) -> Work:
    from fleetbus_workers.gateway.agent_gateway import AgentGatewaySettings, run_agent_gateway
    from fleetbus_workers.gateway.agent_keys import check_token
    from fleetbus_workers.serving.listeners import bind, format_host

    check_token(token)
    listener = bind(host, port)
    url = public_url or f"http://{format_host(host)}:{listener.getsockname()[1]}"
    settings = AgentGatewaySettings(url=url, find_server=resolve_server_url, token=token, guard=guard)
    return partial(run_agent_gateway, listener=listener, settings=settings)


def _load_gym(host: str, port: int, given: dict[str, Any], image: list[Any], in_process: bool) -> Work:
    from fleetbus_workers.gateway.gym_app import GymGateway, GymSettings
    from fleetbus_workers.gateway.gym_methods import GymCalls
    from fleetbus_workers.gateway.image_format import parse_image_format

    settings = GymSettings(**given)
    try:
        images = parse_image_format(*image)
    except ValueError as error:
        raise UserError(str(error)) from error

    def application(entered: Entered, build_loader: BuildLoader) -> Any:
        @asynccontextmanager
        async def open_calls() -> AsyncIterator[GymCalls]:
            async with entered() as client:
                yield GymCalls(
                    client,
                    call_seconds=settings.call_seconds,
                    max_sessions=settings.max_sessions,
                    load=build_loader(client),
                    images=images,
                )

        return GymGateway(open_calls, settings).application()

    return _build_gateway_work(host, port, application, in_process)


def _load_openenv(host: str, port: int, given: dict[str, Any], in_process: bool) -> Work:
    from fleetbus_workers.gateway.openenv_app import OpenEnvGateway, OpenEnvSettings

    settings = OpenEnvSettings(**given)

    def application(entered: Entered, build_loader: BuildLoader) -> Any:
        return OpenEnvGateway(entered, settings, build_loader=build_loader).application()

    return _build_gateway_work(host, port, application, in_process)


def _build_gateway_work(host: str, port: int, application: Callable[[Entered, BuildLoader], object], in_process: bool) -> Work:
    """A role that serves an application over the sessions of the run; the port is taken before anything else happens. With
    ``in_process`` the environments of the configuration are run here as well."""
    import structlog

    from fleetbus.client.sessions import sessions
    from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
    from fleetbus_workers.gateway.images import InMemoryImageStore, build_image_loader
    from fleetbus_workers.serving.listeners import bind, format_host
    from fleetbus_workers.serving.serve import serve

    if in_process:
        from fleetbus_workers.assembly.hosted_environments import host_environments

    listener = bind(host, port)

    async def work(bus: Bus, configuration: Configuration, name: str, drain: anyio.Event) -> None:
        subjects = Subjects(configuration.run.name)
        images = InMemoryImageStore()

        def build_loader(client: SessionClient) -> LoadImage | None:
            objects = get_image_store(client.bus, client.subjects.run)
            return images.load_before(build_image_loader(objects)) if objects else None

        lifecycle = WorkerLifecycle(
            bus, subjects, role="gateway", worker=name, beat=lambda: Heartbeat(role="gateway", worker=name), lane=None
        )
        async with run_lifecycle(lifecycle, bus, None, slots=0), AsyncExitStack() as stack:
            opened: AbstractAsyncContextManager[SessionClient] = sessions(bus, subjects)
            if in_process:  # before a port is served: what is wrong with an environment is said in a line
                client = await stack.enter_async_context(opened)
                url, keep = resolve_server_url(configuration), images.before
                await stack.enter_async_context(
                    host_environments(client, configuration, worker=f"{name}-hosted", url=url, keep_image=keep)
                )
                opened = nullcontext(client)
            structlog.get_logger().info("listening", url=f"http://{format_host(host)}:{listener.getsockname()[1]}")
            await serve(application(lambda: opened, build_loader), listener, drain)

    return work
