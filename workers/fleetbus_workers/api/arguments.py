"""Keyword arguments of `fleetbus.train` and `fleetbus.Run` as a configuration, merged and checked as the command line does."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.config.fields import Setting, list_settings
from fleetbus.config.load import LoadedConfiguration, find_default_file, load_configuration
from fleetbus.config.run_folder import read_earlier_configuration, run_folder
from fleetbus.errors import UserError
from fleetbus.tasks.files import build_tasks, dump_tasks
from fleetbus_schemas import Task
from fleetbus_workers.api.environment_object import build_object_spec, check_environment_object

EnvironmentArgument = str | Sequence[str] | Callable[[], Any] | None
TasksArgument = str | os.PathLike[str] | Iterable[Task | Mapping[str, Any]] | None

SHORT_NAMES = {
    "environment": "run.environment",
    "tasks": "run.tasks",
    "model": "run.model",
    "name": "run.name",
    "folder": "run.folder",
    "seed": "run.seed",
    "steps": "learner.steps",
}
"""Arguments without their table's name; any other setting is ``table_key``, as ``learner_groups``."""


class RunArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a run. ``factory`` is the environment if it is an object; ``tasks`` are written to a file, if a list."""

    loaded: LoadedConfiguration
    factory: Callable[[], Any] | None = None
    tasks: tuple[Task, ...] = ()
    tasks_file: Path | None = None


def parse_arguments(
    environment: EnvironmentArgument,
    tasks: TasksArgument,
    config: str | os.PathLike[str] | None,
    settings: Mapping[str, object],
) -> RunArguments:
    """The configuration of a run: defaults < the run's earlier configuration < TOML file < variables < arguments. ``settings``
    has the other arguments, None for those that were not given. Raises `UserError` naming the argument."""
    given = {name: value for name, value in settings.items() if value is not None}
    factory = None
    if environment is not None and not isinstance(environment, str):
        if isinstance(environment, Sequence):
            environment = [*environment]
        else:
            check_environment_object(environment)
            factory, environment = environment, build_object_spec(environment)
    if environment is not None:
        given["environment"] = environment
    if tasks is None or isinstance(tasks, str | os.PathLike):
        loaded = _load({**given, "tasks": tasks} if tasks is not None else given, config)
        return RunArguments(loaded=loaded, factory=factory)
    built = tuple(build_tasks(tasks, "the argument tasks"))
    run = _load(given, config).configuration.run
    digest = hashlib.sha256(msgspec.msgpack.encode(built)).hexdigest()[:12]
    file = run_folder(run).path / f"tasks-{digest}.json"
    return RunArguments(loaded=_load({**given, "tasks": file}, config), factory=factory, tasks=built, tasks_file=file)


@contextmanager
def write_tasks_file(arguments: RunArguments) -> Iterator[None]:
    """The file of a list of tasks, which stays after the block; if the block raises, what was made here is removed."""
    file = arguments.tasks_file
    if file is None or file.exists():
        yield
        return
    file = file.expanduser()
    missing = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        dump_tasks(arguments.tasks, file)
    except OSError as error:
        raise UserError(f"cannot write {file} ({error.strerror}): choose another folder with the argument folder") from error
    except TypeError as error:
        raise UserError(
            f"the argument tasks contains values that JSON cannot represent: {error}; use text, numbers, lists and objects"
        ) from error
    try:
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        for folder in missing:
            with suppress(OSError):  # another program has put something there meanwhile
                folder.rmdir()
        raise


def _load(given: Mapping[str, Any], config: str | os.PathLike[str] | None) -> LoadedConfiguration:
    flags: dict[str, object] = {}
    typed: dict[str, str] = {}
    for argument, value in given.items():
        setting = find_setting(argument)
        if setting.name in flags:
            raise UserError(f"{typed[setting.name]} and {argument} are the same setting: give one of them")
        flags[setting.name] = os.fspath(value) if isinstance(value, os.PathLike) else value
        typed[setting.name] = argument
    file = Path(config) if config is not None else find_default_file(Path.cwd())
    return load_configuration(file=file, variables=os.environ, flags=flags, typed=typed, earlier=read_earlier_configuration)


def find_setting(argument: str) -> Setting:
    """The setting that an argument stands for. Raises `UserError` naming the nearest one."""
    by_name = {setting.name: setting for setting in list_settings()}
    by_argument = {f"{setting.table}_{setting.key}": setting for setting in by_name.values()}
    by_argument |= {short: by_name[name] for short, name in SHORT_NAMES.items()}
    if argument in by_argument:
        return by_argument[argument]
    near = [f"{setting.table}_{setting.key}" for setting in by_name.values() if setting.key == argument]
    near = near or difflib.get_close_matches(argument, list(by_argument), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`fleetbus up --help` lists the settings; learner.groups is learner_groups"
    raise UserError(f"unknown argument {argument}; {hint}")
