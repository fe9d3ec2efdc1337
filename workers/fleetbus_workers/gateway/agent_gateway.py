"""``fleetbus gateway agents``: an environment worker whose episodes are played by agents outside.

The worker is as any other - claims, leases, time limits, takeover, drain - but for what it takes: a request for each agent that
asks for one. Its environments wait for calls over HTTP. A second connection asks for evaluations, which a worker must not.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from socket import socket

import anyio
import msgspec
import structlog

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus, LogBus
from fleetbus.config.pools import list_pools
from fleetbus.config.settings import Configuration
from fleetbus.delivery.requests import Requests
from fleetbus.errors import UserError
from fleetbus.log.episodes import read_answered_observations, read_episode_state, read_turns
from fleetbus.tasks.files import load_dataset
from fleetbus_schemas import EpisodeRequested, Subjects, Task
from fleetbus_schemas.tokens import unpack_ids, unpack_logprobs
from fleetbus_workers.environment.adapters.agent.elsewhere import ElsewhereEnvironment
from fleetbus_workers.environment.adapters.agent.sessions import MOVED, KeyRefused, SessionMoved, TooManyCalls
from fleetbus_workers.environment.episode.segments import Placement
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.environment.worker import run_environment
from fleetbus_workers.gateway.agent_app import Gateway, build_agent_application
from fleetbus_workers.gateway.agent_keys import SessionKeys, read_secret
from fleetbus_workers.gateway.agent_sessions import AgentSessions
from fleetbus_workers.gateway.rollouts import Parent, Rollouts, read_request, read_task
from fleetbus_workers.serving.browser_guard import GuardSettings
from fleetbus_workers.serving.serve import serve

ROOM_SECONDS = 5.0
"""How long a session waits for room in the log."""

log = structlog.get_logger(__name__)


class AgentGatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``url`` is how agents reach the gateway, ``token`` what opens sessions (empty: nothing is needed). ``find_server`` gives
    the address of the run's NATS server."""

    url: str
    find_server: Callable[[Configuration], str]
    token: str = ""
    guard: GuardSettings


async def run_agent_gateway(
    bus: Bus,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    *,
    listener: socket,
    settings: AgentGatewaySettings,
) -> None:
    """Serve until drained: sessions end, or are released to other gateways of the run. Raises `UserError`."""
    check_configuration(configuration)
    limits, run = configuration.limits, configuration.run
    subjects = Subjects(run.name)
    try:
        keys = SessionKeys(read_secret(settings.token, run), run.name)
    except OSError as error:
        raise UserError(f"the run's folder cannot be written: {error}; set AGENTS_TOKEN, or --run-folder") from error
    sessions = AgentSessions(bus, subjects, keys)
    verifier = Verifier(VerifierLimits(seconds=limits.verify), sandbox=configuration.environment.sandbox)
    make = partial(
        ElsewhereEnvironment,
        sessions,
        grader=verifier,
        reward_seconds=limits.verify / 2,
        settings=configuration.environment,
    )
    configuration = msgspec.structs.replace(
        configuration, environment=msgspec.structs.replace(configuration.environment, session_slots=0)
    )
    tasks = {task.key: task for task in load_dataset(run.tasks)} if run.tasks else {}
    slots, stop = configuration.environment.slots, anyio.Event()

    def is_full() -> bool:
        return sessions.count_open() >= slots

    async with (
        verifier.run(),
        open_requests(configuration, settings.find_server(configuration), name) as requests,
        anyio.create_task_group() as group,
    ):

        async def ask(task: Task, version: int | None, temperature: float | None, episode: str) -> EpisodeRequested:
            if requests is None:
                raise KeyRefused("this gateway opens no evaluations: its machine has no key of the user operator")
            with anyio.move_on_after(ROOM_SECONDS) as waiting:
                await requests.wait_for_room()
            if waiting.cancelled_caught:
                raise TooManyCalls("the log has no room for another session at the moment: repeat the call")
            request = requests.build_request(
                task,
                episode_id=episode,
                group_id=episode,
                sample_index=0,
                group_size=1,
                split="eval",
                lineage="",
                version=version or 0,
                pinned=version is not None,
                temperature=temperature,
            )
            stored = await requests.publish(request)
            requests.mark_answered(episode)  # its gateway says how it ends, whichever that is then
            return stored.request  # its keys last as long

        async def open_rollout(episode: str, parent: Parent) -> EpisodeRequested:
            if (stored := await rollouts.find_request(episode)) is not None:
                return stored
            if drain.is_set():
                raise SessionMoved(MOVED)
            if is_full():
                raise TooManyCalls("as many sessions are open as this gateway has slots: repeat the call when one has ended")
            request = await ask(read_task(parent, tasks), parent.version, parent.temperature, episode)
            return await rollouts.find_request(episode) or request  # another call, or gateway, may have been first

        rollouts = Rollouts(bus, subjects, list_pools(run), keys, sessions, open_rollout)
        gateway = Gateway(
            sessions=sessions,
            rollouts=rollouts,
            url=settings.url,
            token=settings.token,
            tasks=tasks,
            ask=ask,
            read=partial(read_trajectory, bus, subjects, list_pools(run)),
            is_full=is_full,
            drain=drain,
        )
        log.info("listening", url=settings.url)
        group.start_soon(serve, build_agent_application(gateway, settings.guard), listener, stop)
        await run_environment(bus, configuration=configuration, name=name, drain=drain, make=make, intake=sessions)
        stop.set()


@asynccontextmanager
async def open_requests(configuration: Configuration, url: str, name: str) -> AsyncIterator[Requests | None]:
    """Requests of evaluations, on a connection with the operator's rights; None where this machine has no key of its."""
    from fleetbus.bus.nats import connect

    run = configuration.run.name
    try:
        access = build_access("evaluate", configuration.nats.auth, run)
    except UserError as error:
        log.info("no evaluations are opened here", reason=str(error))
        yield None
        return
    async with connect(url, run=run, role="evaluate", worker=f"{name}-requests", **access) as bus:
        yield Requests(bus, Subjects(run), configuration=configuration, worker=name)


def check_configuration(configuration: Configuration) -> None:
    """Raises `UserError` for what an agent decides itself."""
    environment = configuration.environment
    changed = {
        "environment.compaction": environment.compaction != "off",
        "environment.context_status": environment.context_status,
        "environment.context_tools": environment.context_tools,
        "inference.reasoning = template": configuration.inference.reasoning == "template",
    }
    if wrong := [setting for setting, is_set in changed.items() if is_set]:
        raise UserError(f"an agent decides about its context itself: leave out {', '.join(wrong)}")


async def read_trajectory(bus: LogBus, subjects: Subjects, pools: Sequence[str], episode: str) -> dict[str, object] | None:
    """None for an episode that nobody asked for, or that has left the log. ``prompt_ids`` are what a turn's messages became,
    ``sampled_ids`` and ``logprobs`` what the policy said; a turn continues the ids of its ``segment``."""
    request = await read_request(bus, subjects, pools, episode)
    if request is None:
        return None
    state = await read_episode_state(bus, subjects, episode)
    turns = await read_turns(bus, subjects, episode, state)
    observed = await read_answered_observations(bus, subjects, request.policies, episode, turns)
    shown = []
    for turn in turns:
        action, asked = turn.action, observed.get(turn.action.turn)
        shown.append(
            {
                "turn": action.turn,
                "segment": action.segment,
                "origin": None if asked is None else msgspec.to_builtins(Placement.of(asked).origin),
                "messages": [] if asked is None else msgspec.to_builtins(asked.messages),
                "tools": [] if asked is None else msgspec.to_builtins(asked.tools),
                "text": action.text,
                "tool_calls": msgspec.to_builtins(action.tool_calls),
                "prompt_ids": unpack_ids(action.prompt_delta),
                "sampled_ids": unpack_ids(action.sampled),
                "logprobs": unpack_logprobs(action.logprobs),
                "versions": [span.version for span in action.versions],
            }
        )
    result = state.result
    return {
        "id": episode,
        "task_key": request.task.key,
        "split": request.split,
        "attempts": state.attempts,
        "turns": shown,
        "outcome": None if result is None else result.outcome,
        "reward": None if result is None else result.reward,
    }
