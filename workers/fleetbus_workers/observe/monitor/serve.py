"""Serves the page on one socket until it is asked to stop; the socket is bound before its address is announced."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import anyio
import uvicorn

from fleetbus.bus.base import Bus
from fleetbus.config.run_folder import run_folder
from fleetbus.config.settings import Configuration
from fleetbus_schemas import Subjects
from fleetbus_workers.assembly.model import find_model_folder
from fleetbus_workers.observe.monitor.access_key import PARAMETER
from fleetbus_workers.observe.monitor.actions import Actions, OpenBus
from fleetbus_workers.observe.monitor.app import Site
from fleetbus_workers.observe.monitor.compared_evaluations import ComparedEvaluations, OpenRun
from fleetbus_workers.observe.monitor.diagnosed_run import DiagnosedRun
from fleetbus_workers.observe.monitor.images import ObservedImages
from fleetbus_workers.observe.monitor.text_search import TextSearch
from fleetbus_workers.observe.monitor.token_decoder import load_token_decoder
from fleetbus_workers.observe.monitor.trainer_tokens import TrainerTokens
from fleetbus_workers.observe.run.run_observer import RunObserver
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Driver
from fleetbus_workers.serving.browser_guard import build_guard_settings
from fleetbus_workers.serving.connections import Bounds
from fleetbus_workers.serving.listeners import SignalFreeServer, format_host
from fleetbus_workers.serving.protocol_choice import build_bounded_protocol
from fleetbus_workers.weights.store import get_every_object

STOP_SECONDS = 3


def build_address(host: str, bound: socket.socket, key: str) -> str:
    """The address that a person opens."""
    return f"http://{format_host(host)}:{bound.getsockname()[1]}/{f'?{PARAMETER}={key}' if key else ''}"


async def serve(
    bus: Bus,
    configuration: Configuration,
    *,
    host: str,
    bound: socket.socket,
    stop: anyio.Event,
    on_ready: Callable[[str], None],
    nats_http: Callable[[], str | None] = lambda: None,
    driver: Driver | None = None,
    allowed_hosts: Sequence[str] = (),
    key: str = "",
    open_operator: OpenBus | None = None,
    open_other: OpenRun | None = None,
    rejoins: bool = False,
) -> None:
    """Watch the run and serve its page on ``bound`` until ``stop`` is set. ``on_ready`` gets the address once it answers;
    ``nats_http`` says where the NATS server reports on itself now, as `observe.run.nats_http` takes it; ``driver``
    is who drives the run, as far as it is known; ``key`` is asked for, and stands in the address, unless empty;
    ``open_operator`` connects with an operator's rights, for what the page may do to the run: without it nothing;
    ``open_other`` connects to other runs on this machine, without which none is compared;
    ``rejoins``: ``bus`` is soon served again when the run ends."""
    subjects = Subjects(configuration.run.name)
    state, policy = RunState(configuration.learner.steps), configuration.run.policy
    watch = RunObserver(bus, subjects, state, driver, recent_first=True, policy=policy)
    words = await anyio.to_thread.run_sync(load_token_decoder, find_model_folder(configuration.run))
    guard = build_guard_settings(host, allowed_hosts, ())
    folder = run_folder(configuration.run)
    search = TextSearch(bus, subjects, folder.text_index)
    threshold = configuration.evaluation.success_threshold
    close_seconds = configuration.limits.close + 5
    actions = None if open_operator is None else Actions(open_operator, subjects, close_seconds=close_seconds)
    site = Site(
        watch,
        subjects,
        words,
        search,
        ObservedImages(get_every_object(bus, subjects.run)),
        TrainerTokens(bus, subjects, folder.tokens),
        DiagnosedRun(bus, subjects, policy),
        ComparedEvaluations(bus, subjects, folder.path.parent, open_other, success_threshold=threshold),
        guard=guard,
        admission=configuration.nats.admission,
        success_threshold=threshold,
        runs=folder.path.parent,
        key=key,
        actions=actions,
        rejoins=rejoins,
    )
    protocol = build_bounded_protocol(Bounds())
    settings = uvicorn.Config(
        site.app,
        http=protocol,
        limit_concurrency=protocol.bounds.connections,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
        ws="none",
    )
    server = SignalFreeServer(settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        tasks.start_soon(search.follow)
        tasks.start_soon(watch.follow_server_view, nats_http)

        async def wait_until_ready() -> None:
            await stop.wait()
            site.stopping.set()
            server.should_exit = True

        tasks.start_soon(wait_until_ready)
        on_ready(build_address(host, bound, key))
        try:
            await server.serve(sockets=[bound])
        finally:
            site.stopping.set()
            server.should_exit = True
        tasks.cancel_scope.cancel()
