"""The two halves of a split as files, in place of what an earlier split left there."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetbus.errors import UserError
from fleetbus.tasks.files import build_task_entry, dump_tasks
from fleetbus.tasks.parquet import require_pyarrow, write_parquet
from fleetbus_schemas import Task

HALVES = ("train", "validation")


def write_split(folder: Path, train: Sequence[Task], evaluation: Sequence[Task], *, formats: Sequence[str]) -> list[Path]:
    """Write ``train.FORMAT`` and ``validation.FORMAT`` for each format, ``json`` or ``parquet``; returns what was written.

    Each file appears whole or not at all; the file of an empty half is removed. Raises `UserError` if that cannot be done.
    """
    if "parquet" in formats:
        require_pyarrow(str(folder))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for half, tasks in zip(HALVES, (train, evaluation), strict=True):
            for kind in formats:
                path = folder / f"{half}.{kind}"
                if tasks:
                    _replace(path, tasks, dump_tasks if kind == "json" else _write_parquet)
                    written.append(path)
                else:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}); choose another folder with --output") from error
    return written


def _replace(path: Path, tasks: Sequence[Task], write: Callable[[Sequence[Task], Path], None]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        write(tasks, Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write_parquet(tasks: Sequence[Task], path: Path) -> None:
    write_parquet([build_task_entry(task) for task in tasks], path)
