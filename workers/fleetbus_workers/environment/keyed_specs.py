"""Several kinds of environments in one run: each task is played in the environment that its key asks for.

``KEY=SPEC`` serves the tasks whose environment key is KEY; a plain SPEC serves all others. Above it is the environment worker;
below it one factory per SPEC (`fleetbus_workers.environment.specs`).
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.base import Environment, EnvironmentFailed
from fleetbus_workers.environment.specs import check_task_configs, find_adapter

DEFAULT = ""
"""The key under which a plain SPEC stands."""

_KEYED = re.compile(r"(?!(?:stdio|verifiers|inspect|bfcl|tau2)\+)([^\s:=]+)=(.+)", re.DOTALL)
_MAX_LISTED_TASKS = 3


def parse_keyed_specs(text: str) -> dict[str, str]:
    """The specs in ``text``, one a line, by environment key. Raises `UserError` if a key or the default comes twice."""
    specs: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _KEYED.fullmatch(line)
        key, spec = match.groups() if match else (DEFAULT, line)
        if key in specs:
            owner = f"for the key {key!r}" if key else "without a key"
            raise UserError(f"two environments {owner}: {specs[key]!r} and {spec!r}; give each its own KEY=SPEC")
        specs[key] = spec
    if not specs:
        raise UserError("no environment: give --environment SPEC, or --environment KEY=SPEC for each environment key")
    return specs


def check_tasks_are_served(specs: Mapping[str, str], tasks: Sequence[Task]) -> None:
    """Raise `UserError` if none of ``specs`` serves a task, or a task lacks what its spec leaves to it."""
    for key, spec in specs.items():
        check_task_configs(spec, (task for task in tasks if _find_key(specs, task) == key))
    unserved = [task for task in tasks if _find_key(specs, task) not in specs]
    if unserved:
        keys = sorted({task.env for task in unserved})
        shown = ", ".join(task.key for task in unserved[:_MAX_LISTED_TASKS]) + (
            " ..." if len(unserved) > _MAX_LISTED_TASKS else ""
        )
        raise UserError(
            f"no environment for the key {', '.join(map(repr, keys))} ({len(unserved)} tasks: {shown}): add "
            f"--environment {keys[0] or 'KEY'}=SPEC, or a plain --environment SPEC for all other keys"
        )


def check_forms(text: str) -> None:
    """Raise `UserError` for a spec in ``text`` that is not written as its kind is; nothing is imported."""
    for spec in parse_keyed_specs(text).values():
        find_adapter(spec)


def _find_key(specs: Mapping[str, str], task: Task) -> str:
    return task.env if task.env in specs else DEFAULT


def build_keyed_factory(text: str, make_factory: Callable[[str], EnvironmentFactory]) -> EnvironmentFactory:
    """One factory for all specs in ``text``: that of the only SPEC itself if it has no key, else a `KeyedEnvironments`."""
    specs = parse_keyed_specs(text)
    if list(specs) == [DEFAULT]:
        return make_factory(specs[DEFAULT])
    return KeyedEnvironments({key: make_factory(spec) for key, spec in specs.items()})


class KeyedEnvironments:
    """Makes each task's environment with the factory of its key. ``factories`` has the default under `DEFAULT`, if any."""

    def __init__(self, factories: Mapping[str, EnvironmentFactory]) -> None:
        self._factories = factories

    def for_task(self, task: Task) -> Environment:
        """Raises `EnvironmentFailed` if nothing serves the task's key."""
        factory = self._factories.get(task.env) or self._factories.get(DEFAULT)
        if factory is None:
            served = ", ".join(sorted(self._factories))
            raise EnvironmentFailed(f"no environment for the key {task.env!r} of task {task.key}; this worker serves {served}")
        return factory()

    def __call__(self) -> Environment:
        """An environment of the default; raises `EnvironmentFailed` if there is none."""
        return self.for_task(Task(key="", env=DEFAULT))

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for factory in self._factories.values():
                await stack.enter_async_context(factory.run())
            yield
