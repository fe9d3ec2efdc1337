"""The targets of fuzzing by name, and what counts as a finding. Used by the fuzzer (`run`) and by the test of kept inputs.

A target is a module beside this one: ``run(data)`` gives bytes to code that reads what others wrote, and raises whatever is no
refusal of that code's own; ``list_seeds()`` are bytes to begin with; ``TREE``, where it has one, is the pair of functions that
turn an input into a tree of values and back, for mutations that keep its form; ``MAX_BYTES`` is its longest input.
See docs/decisions/0239-fuzzing-guided-by-coverage.md.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

TARGETS = ("messages", "recordings", "archives", "http_reader", "task_files", "dialects")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CRASHES = HERE / "crashes"
"""Inputs that once were findings, in a folder per target, each by the name of what it did."""

CORPORA = HERE / "corpora"
"""The smallest inputs that reached something new: a ZIP file per target."""

MAX_INPUT_BYTES = 1 << 14
"""Of targets that say nothing else."""

MAX_SECONDS = 5.0
"""CPU time of one input."""

OWN = tuple(f"{ROOT}/{folder}/" for folder in ("schemas", "fleetbus", "workers"))


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that an input becomes, in memory where that is possible: opening files takes longer than reading."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fleetbus-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)


def load_target(name: str) -> ModuleType:
    """The module of a target."""
    return importlib.import_module(f"tests.fuzz.{name}")


def find_fault(target: ModuleType, data: bytes) -> str:
    """The name of what is wrong with how the target takes an input, with the traceback below it; empty if nothing is."""
    started = time.process_time()
    try:
        target.run(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what an error of the interpreter raises
        return f"{_name(error)}\n{''.join(traceback.format_exception(error, limit=-25))}"
    spent = time.process_time() - started
    return f"slow.{spent:.0f}s\n" if spent > MAX_SECONDS else ""


def list_kept(name: str) -> Iterator[tuple[str, bytes]]:
    """The inputs of a target that are kept, with their names."""
    for file in sorted((CRASHES / name).glob("*")):
        yield file.name, file.read_bytes()
    corpus = CORPORA / f"{name}.zip"
    if corpus.exists():
        with ZipFile(corpus) as archive:
            for each in archive.namelist():
                yield each, archive.read(each)


def _name(error: BaseException) -> str:
    """The kind of error and the innermost of our functions that it passed: the same for every input that has the same cause."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((frame for frame in reversed(frames) if frame.filename.startswith(OWN)), frames[-1])
    return f"{type(error).__name__}.{Path(place.filename).stem}.{place.name.strip('<>')}"
