"""Training runs from Python: `train` blocks until the end, `Run` is for programs that do other things meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from fleetbus.errors import FleetbusError
from fleetbus.recording.episodes import EpisodeRow
from fleetbus_workers.api.arguments import EnvironmentArgument, RunArguments, TasksArgument, parse_arguments
from fleetbus_workers.api.evaluation import Evaluation, evaluate_run
from fleetbus_workers.api.events import Event
from fleetbus_workers.api.own_loop import run_in_own_loop
from fleetbus_workers.api.reader import open_configured_run
from fleetbus_workers.api.run_thread import RunThread
from fleetbus_workers.up.summary_builder import Summary


def print_event(event: Event) -> None:
    """Print the line that `fleetbus up` prints for an event."""
    print(event.text, flush=True)  # noqa: T201


def train(
    environment: EnvironmentArgument = None,
    tasks: TasksArgument = None,
    model: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    config: str | os.PathLike[str] | None = None,
    on_event: Callable[[Event], None] | None = print_event,
    **settings: Any,
) -> Summary:
    """Train a policy on this machine as `fleetbus up` does, and return the summary of the run once it has ended.

    ``environment``: a SPEC (docs/environments.md) or a list of them, or a class or callable without arguments that makes
    environments, also one of a notebook cell or of ``__main__``. ``tasks``: a path or URL, or a list of `Task` or of mappings
    as in a tasks file. ``model``: a Hugging Face model folder. Each may be left out: the warehouse, its tasks, the starter
    policy. ``name`` and ``folder`` of the run: the same name again resumes it, and returns at once if it has its steps.
    Further settings are those of the command line as ``table_key``: ``learner_groups=4`` is ``--learner-groups 4``; what is
    not given comes from the run's earlier start, ``config`` (fleetbus.toml in the working folder) and variables, as there.

    ``on_event`` gets each event in the calling thread; None: none. Interrupted (Ctrl-C), or if ``on_event`` raises, it stops
    everything in order and raises on; interrupted again it kills what still runs. Raises `UserError` for bad input before
    anything is started, `RunFailed` if a worker cannot work.
    """
    given = {"model": model, "name": name, "folder": folder, "steps": steps, "seed": seed, **settings}
    thread = RunThread(parse_arguments(environment, tasks, config, given))
    try:
        thread.start()
        for event in thread.events.iterate():
            if on_event is not None:
                on_event(event)
        thread.join()
    except BaseException:
        _stop_blocking(thread)
        raise
    return thread.result()


def _stop_blocking(thread: RunThread) -> None:
    try:
        thread.request_stop()
        thread.join()
    except KeyboardInterrupt:
        thread.kill()
        thread.join()
        raise


class Run:
    """A training run as an asynchronous context manager, for asyncio and trio. Arguments are those of `train`.

    Entering checks everything (`UserError`) and starts the run in a thread of its own. Leaving, also by an exception or a
    cancelled scope, stops what still runs, in order, and waits until nothing is left.
    """

    def __init__(
        self,
        environment: EnvironmentArgument = None,
        tasks: TasksArgument = None,
        model: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        steps: int | None = None,
        seed: int | None = None,
        config: str | os.PathLike[str] | None = None,
        **settings: object,
    ) -> None:
        given = {"model": model, "name": name, "folder": folder, "steps": steps, "seed": seed, **settings}
        self._parse: Callable[[], RunArguments] = partial(parse_arguments, environment, tasks, config, given)
        self._started: RunThread | None = None

    async def __aenter__(self) -> Self:
        if self._started is not None:
            raise FleetbusError("this Run was started already: make another one to resume it")
        self._started = RunThread(await anyio.to_thread.run_sync(self._parse))
        try:
            await anyio.to_thread.run_sync(self._started.start)
        except BaseException:
            await self._end(self._started)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(self._thread)

    @property
    def summary(self) -> Summary | None:
        """The summary of a run that has ended, None until then."""
        return self._thread.summary if self._thread.has_ended else None

    def events(self) -> AsyncIterator[Event]:
        """The events from the start of this `Run` on, as they come, until it has ended; several may read them."""
        return self._thread.events.stream()

    async def finished(self) -> Summary:
        """Wait until training is finished or stopped. Raises `RunFailed` if a worker cannot work."""
        await self._thread.events.wait_closed()
        self._thread.join()
        return self._thread.result()

    async def stop(self) -> Summary:
        """Stop in order and wait for it: within 10 s. The same arguments again resume the run."""
        self._thread.request_stop()
        return await self.finished()

    async def episodes(self) -> list[EpisodeRow]:
        """One row per episode so far, in the order of their requests; also after the run has ended."""
        reader = open_configured_run(self._thread.configuration)
        return await run_in_own_loop(reader.read_episodes)

    async def evaluate(
        self,
        *,
        episodes: int | None = None,
        samples: int = 1,
        ks: Sequence[int] | None = None,
        temperature: float | None = None,
    ) -> Evaluation:
        """Play held-out tasks with the newest version of the policy, as `fleetbus evaluate` does: ``samples`` episodes of each
        of ``episodes`` tasks (the run's setting), pass@k for each of ``ks`` (1 and ``samples``). Training continues meanwhile;
        after its end, workers are started for it in this process. Raises `UserError`."""
        thread = self._thread
        return await run_in_own_loop(
            partial(
                evaluate_run,
                thread.configuration,
                episodes=episodes,
                samples=samples,
                ks=ks,
                temperature=temperature,
                environment_work=thread.build_environment_work(),
            )
        )

    @property
    def _thread(self) -> RunThread:
        if self._started is None:
            raise FleetbusError("this Run is not started: use `async with fleetbus.Run(...) as run`")
        return self._started

    async def _end(self, thread: RunThread) -> None:
        """A second cancellation, which a shield cannot hold off in plain asyncio, kills what still runs."""
        thread.request_stop()
        try:
            with anyio.CancelScope(shield=True):
                await thread.events.wait_closed()
        except BaseException:
            thread.kill()
            raise
        finally:
            thread.join()
