"""Tasks files: the JSON format of Fleet, read with errors that a person can act on, and written.

Where the files are is the matter of `datasets`. A file is a list of objects, or an object whose ``tasks`` is such a
list; one that ends in ``.jsonl`` has an object per line. Names as Fleet exports them are understood (see `Task`); every field
that has no meaning here goes into the task's ``config``, where its environment finds it, unless it looks like a mistyped one or
stands in ``config`` already.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.core.text.verifier_parameters import GIVEN, find_unknown_parameter
from fleetbus.core.text.verifier_warnings import find_forgeable
from fleetbus.errors import UserError
from fleetbus.tasks import harbor
from fleetbus.tasks.datasets import read_dataset_files
from fleetbus.tasks.parquet import read_parquet
from fleetbus_schemas import MAX_INLINE_BYTES, Task

_NAMES: dict[str, tuple[str, ...]] = {
    "key": ("key", "task_key"),
    "prompt": ("prompt",),
    "env": ("env_key", "env_id", "env"),
    "version": ("env_version", "version"),
    "modality": ("task_modality",),
    "env_variables": ("env_variables",),
    "verifier": ("verifier_code", "verifier_func"),
    "seed": ("seed",),
    "config": ("config",),
}
"""Field of a Task: its names in the file, the one that wins first."""

MODALITIES = ("tool_use", "computer_use", "browser_use")
"""What a task is for: tools, or the screen of a computer or of a browser."""

_KNOWN = frozenset(name for names in _NAMES.values() for name in names)
_WORDS = frozenset({"speed"})
"""Names of their own that one letter tells from a field."""


def load_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """The tasks in a file, in its order. Raises `UserError` with one line that names the file, the place and the remedy."""
    file = Path(path).expanduser()
    tasks, problems = _parse(str(file), _read(file))
    if problems:
        raise UserError(problems[0])
    return tasks


def load_tasks_by_key(path: str | os.PathLike[str]) -> Mapping[str, Task]:
    """As `load_tasks`, by key. A file is read once, and again when it has changed: some trainers ask for it per episode."""
    file = Path(path).expanduser()
    return _load_by_key(file, file.stat().st_mtime_ns if file.exists() else 0)


@lru_cache(maxsize=8)
def _load_by_key(file: Path, changed_ns: int) -> Mapping[str, Task]:
    return {task.key: task for task in load_tasks(file)}


def load_dataset(location: str) -> list[Task]:
    """The tasks at a location (see `fleetbus.tasks.datasets`), each with the dataset's version. Raises `UserError`."""
    tasks, problems = check_dataset(location)
    if problems:
        raise UserError(problems[0])
    return tasks


def check_dataset(location: str) -> tuple[list[Task], list[str]]:
    """The tasks at a location, and one line for each thing that is wrong. Raises `UserError` if there is nothing to read."""
    if location.startswith(harbor.PREFIX):
        return harbor.check_harbor(location)
    files = read_dataset_files(location)
    tasks: list[Task] = []
    problems: list[str] = []
    for source in files.sources:
        found, wrong = _parse(source.name, source.data)
        tasks += found
        problems += wrong
    if len(files.sources) > 1:
        problems += _find_repeated_keys(location, tasks)
    return [msgspec.structs.replace(task, dataset_version=files.version) for task in tasks], problems


def build_tasks(entries: Iterable[Task | Mapping[str, object]], name: str = "tasks") -> list[Task]:
    """Tasks from objects, or from mappings as they stand in a tasks file. Raises `UserError`, which calls the list ``name``."""
    try:
        listed = None if isinstance(entries, Task | Mapping) else iter(entries)
    except TypeError:
        listed = None
    if listed is None:
        raise UserError(f"{name}: must be a list of tasks, not {type(entries).__name__}")
    content = [
        build_task_entry(entry) if isinstance(entry, Task) else dict(entry) if isinstance(entry, Mapping) else entry
        for entry in listed
    ]
    if not content:
        raise UserError(f"{name}: contains no tasks; add at least one")
    tasks, problems = _parse_content(name, content)
    if problems:
        raise UserError(problems[0])
    return tasks


def check_verifiers(tasks: Iterable[Task]) -> list[str]:
    """One line for each task whose verifier does not compile, or has no function that can be called."""
    problems = []
    for task in tasks:
        if task.verifier is None:
            continue
        try:
            compile(task.verifier, "<verifier>", "exec", dont_inherit=True)
            tree = ast.parse(task.verifier)
            functions = _find_functions(tree)
            if "verify" not in functions and len(functions) != 1:
                defined = ", ".join(functions) or "no function"
                problems.append(f"task {task.key}: its verifier must define verify(); it defines {defined}")
            elif unknown := find_unknown_parameter(tree, "verify" if "verify" in functions else functions[0]):
                problems.append(
                    f"task {task.key}: its verifier has the parameter {unknown!r}; what it gets is named {', '.join(GIVEN)}"
                )
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            problems.append(f"task {task.key}: its verifier is no Python: {reason}{place}")
    return problems


def list_forgeable_verifiers(tasks: Iterable[Task]) -> list[str]:
    """One line for each way in which the policy could forge the verdict of a task's verifier (see `find_forgeable`)."""
    return [f"task {task.key}, its verifier: {warning}" for task in tasks for warning in find_forgeable(task.verifier or "")]


def _find_functions(node: ast.AST) -> list[str]:
    """Names that stand for something to call once a module's code has run: functions and lambdas, and ``verify`` however it is
    bound. What functions and classes define within themselves does not count."""
    names: list[str] = []
    for inner in ast.iter_child_nodes(node):
        match inner:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.append(inner.name)
            case ast.ClassDef():
                names += [inner.name] * (inner.name == "verify")
            case ast.Import() | ast.ImportFrom():
                names += [name for alias in inner.names if (name := alias.asname or alias.name) == "verify"]
            case ast.Assign(targets=[ast.Name(id=name)]) if name == "verify" or isinstance(inner.value, ast.Lambda):
                names.append(name)
            case _:
                names += _find_functions(inner)
    return names


def dump_tasks(tasks: Iterable[Task], path: str | os.PathLike[str]) -> None:
    """Write a tasks file that `load_tasks` reads back as the same tasks."""
    text = json.dumps({"tasks": [build_task_entry(task) for task in tasks]}, indent=2, ensure_ascii=False)
    Path(path).expanduser().write_text(text + "\n", encoding="utf-8")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file}: file not found; give the path of a tasks file") from None
    except IsADirectoryError:
        raise UserError(f"{file}: is a folder; give the path of a tasks file in it") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None


def _parse(name: str, data: bytes) -> tuple[list[Task], list[str]]:
    """The tasks in the bytes of a file that is called ``name``, and what is wrong with those that are none."""
    return _parse_content(name, read_parquet(name, data) if name.endswith(".parquet") else _read_json(name, data))


def _parse_content(name: str, content: object) -> tuple[list[Task], list[str]]:
    tasks, problems = [], []
    for position, entry in enumerate(_parse_entries(name, content), 1):
        try:
            tasks.append(_parse_task(name, position, entry))
        except UserError as error:
            problems.append(str(error))
    return tasks, problems or _find_repeated_keys(name, tasks)


def _read_json(name: str, data: bytes) -> Any:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if not text.strip():
        raise UserError(f'{name}: is empty; it must hold {{"tasks": [...]}}')
    if not name.endswith(".jsonl"):
        return _decode(name, text, 1)
    return [_decode(name, line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _decode(name: str, text: str, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_build_object)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        is_other_form = error.msg == "Extra data" or not name.endswith((".json", ".jsonl"))
        hint = "; tasks are read as JSON (.json), JSON lines (.jsonl) or Parquet (.parquet)" if is_other_form else ""
        raise UserError(f"{name}: is not JSON: line {line}, column {error.colno}: {error.msg}{hint}") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{name}: cannot be read as JSON: {str(error) or 'nested too deeply'}") from None


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. Raises `UserError` for a member that it has twice, of which the first would be lost."""
    built = dict(pairs)
    if len(built) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        place = f" (its key is {built['key']!r})" if "key" in built else ""
        raise UserError(f"an object{place} has {twice!r} twice; keep one of them")
    return built


def _parse_entries(file: str, content: object) -> Sequence[object]:
    if isinstance(content, dict):
        if "tasks" not in content:
            raise UserError(f'{file}: has no "tasks"; it must be a list of tasks or an object with a list "tasks"')
        content = content["tasks"]
    if not isinstance(content, list):
        raise UserError(f'{file}: holds {_describe_type(content)}; it must be a list of tasks or an object with a list "tasks"')
    if not content:
        raise UserError(f"{file}: contains no tasks; add at least one")
    return content


def _parse_task(file: str, position: int, entry: object) -> Task:
    if not isinstance(entry, dict):
        raise UserError(f'{file}: task {position} is {_describe_type(entry)}; it must be an object with "key" and "prompt"')
    key = _find_value(entry, "key")
    place = f"{file}: task {position}" + (f" ({key})" if isinstance(key, str) else "")
    for name in entry:
        if near := _find_mistyped(name):
            raise UserError(f'{place}: {name!r} is no field of a task; did you mean {near}? If not, write it inside "config"')
    if not isinstance(key, str) or not key:
        for name in _NAMES["key"]:
            if entry.get(name) not in (None, ""):
                raise UserError(f"{place}: {name} is {_describe_type(entry[name])}; it must be text that is unique in the file")
        raise UserError(f'{file}: task {position} has no key; add "key": a text that is unique in the file')
    config = _parse_object(place, entry, "config")
    others = {name: value for name, value in entry.items() if name not in _KNOWN}
    if twice := next((name for name in others if name in config), None):
        raise UserError(f"{place}: {twice!r} stands in config and beside it; keep one of them")
    task = Task(
        key=key,
        prompt=_parse_prompt(place, entry.get("prompt")),
        env=_parse_text(place, entry, "env"),
        version=_parse_text(place, entry, "version"),
        modality=_parse_modality(place, entry),
        env_variables=_parse_object(place, entry, "env_variables"),
        verifier=_parse_text(place, entry, "verifier") or None,
        seed=_parse_seed(place, entry.get("seed")),
        config=config | others,
    )
    _check_size(place, task)
    return task


@lru_cache(maxsize=4096)
def _find_mistyped(name: str) -> str | None:
    """The field that a name must be meant for: the same but for case, a letter or two that are swapped. A letter before or
    after it makes a name of its own, such as ``seeds``, and so does another letter in a short one."""
    if name in _KNOWN or name.casefold() in _WORDS:
        return None
    return next((known for known in sorted(_KNOWN) if _is_mistyped(name.strip().casefold(), known)), None)


def _is_mistyped(name: str, known: str) -> bool:
    if abs(len(name) - len(known)) > 1:
        return False
    size = len(known)
    ends = 0 if size > 5 else 1
    return (
        name == known
        or (size > 3 and any(known[:at] + known[at + 1 :] == name for at in range(ends, size - ends)))
        or any(name[:at] + name[at + 1 :] == known for at in range(1, len(name) - 1))
        or any(known[:at] + known[at + 1] + known[at] + known[at + 2 :] == name for at in range(size - 1))
        or (size > 6 and size == len(name) and sum(map(str.__ne__, name, known)) == 1)
    )


def _find_value(entry: dict[str, object], field: str) -> object:
    return next((entry[name] for name in _NAMES[field] if entry.get(name)), None)


def _parse_prompt(place: str, prompt: object) -> str:
    if prompt is not None and not isinstance(prompt, str):
        raise UserError(f"{place}: prompt is {_describe_type(prompt)}; it must be text")
    if prompt is None or (prompt and not prompt.strip()):
        raise UserError(f'{place} has no prompt; add "prompt": the instruction of the policy, "" if the environment gives it')
    return prompt


def _parse_text(place: str, entry: dict[str, object], field: str) -> str:
    value = _find_value(entry, field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: {_find_used_name(entry, field)} is {_describe_type(value)}; it must be text")
    return value


def _parse_modality(place: str, entry: dict[str, object]) -> str:
    modality = _parse_text(place, entry, "modality") or MODALITIES[0]
    if modality not in MODALITIES:
        raise UserError(f"{place}: task_modality is {modality!r}; it must be one of {', '.join(MODALITIES)}")
    return modality


def _parse_object(place: str, entry: dict[str, object], field: str) -> dict[str, object]:
    """An object, or one as JSON text (Fleet's parquet files have it so)."""
    value = _find_value(entry, field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(f"{place}: {_find_used_name(entry, field)} is text that is not JSON; make it an object") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{place}: {_find_used_name(entry, field)} is {_describe_type(value)}; it must be an object")
    return value


def _parse_seed(place: str, seed: object) -> int | None:
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool)):
        return seed
    raise UserError(f"{place}: seed is {_describe_type(seed)}; it must be a whole number")


def _find_used_name(entry: dict[str, object], field: str) -> str:
    return next(name for name in _NAMES[field] if entry.get(name))


def _check_size(place: str, task: Task) -> None:
    """A task travels inside a message, so what it holds must fit in there."""
    try:
        size = len(msgspec.msgpack.encode(task))
    except (OverflowError, UnicodeEncodeError, RecursionError, TypeError) as error:
        raise UserError(f"{place} cannot be sent: {error}; change the value") from None
    if size > MAX_INLINE_BYTES:
        raise UserError(f"{place} has {size} bytes; {MAX_INLINE_BYTES} at most can be sent: shorten it")


def _find_repeated_keys(name: str, tasks: Sequence[Task]) -> list[str]:
    problems = []
    positions: dict[str, int] = {}
    for position, task in enumerate(tasks, 1):
        first = positions.setdefault(task.key, position)
        if first != position:
            problems.append(f"{name}: tasks {first} and {position} have the same key ({task.key}); rename one")
    return problems


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def build_task_entry(task: Task) -> dict[str, object]:
    """A task as an entry of a tasks file."""
    clashing = {name: value for name, value in task.config.items() if name in _KNOWN or _find_mistyped(name)}
    entry = {
        "env_key": task.env,
        "version": task.version,
        "task_modality": task.modality,
        "env_variables": task.env_variables,
        "verifier_code": task.verifier,
        "seed": task.seed,
        "config": clashing,
    }
    given = {name: value for name, value in entry.items() if value not in (None, "", {})}
    return (
        {"key": task.key, "prompt": task.prompt}
        | given
        | {name: value for name, value in task.config.items() if name not in clashing}
    )
