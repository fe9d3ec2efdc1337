"""Whatever fuzzing once found, and the inputs that reach the most: read again with every change, without a fuzzer."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
import pytest
import structlog

from tests.fuzz.mutation import BROKEN, DEPTH, NESTED, mutate_tree, write_json, write_msgpack
from tests.fuzz.run import silence_logs
from tests.fuzz.targets import CORPORA, CRASHES, TARGETS, find_fault, list_kept, load_target

MOST_BYTES = 100_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings about thousands of entries would take longer than what is tested."""
    before = structlog.get_config()
    silence_logs()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("name", TARGETS)
def test_every_kept_input_is_read_or_refused(name: str) -> None:
    target = load_target(name)
    faults = {label: fault for label, data in list_kept(name) if (fault := find_fault(target, data))}
    assert not faults, "\n".join(faults.values())


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_to_begin_with_is_read_or_refused_also_when_it_is_changed(name: str) -> None:
    target, chance = load_target(name), Random(7)
    for seed in target.list_seeds():
        assert not find_fault(target, seed)
        if hasattr(target, "TREE") and len(seed) < 8_000:
            parse, write = target.TREE
            try:
                changed = write(mutate_tree(parse(seed), chance))
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError, msgspec.MsgspecError):
                continue
            assert not find_fault(target, changed)


def test_what_is_kept_is_small_and_of_a_target() -> None:
    assert {folder.name for folder in CRASHES.iterdir()} <= set(TARGETS)
    kept = [*CRASHES.rglob("*"), *CORPORA.glob("*")]
    assert all(file.stat().st_size < MOST_BYTES for file in kept if file.is_file())


def test_a_fault_is_named_after_the_error_and_the_function_of_ours_that_it_passed() -> None:
    class Target:
        @staticmethod
        def run(data: bytes) -> None:
            load_target("messages").run(data)
            msgspec.convert([], int)

    fault = find_fault(Target, b"\xc0")  # type: ignore[arg-type]
    assert fault.partition("\n")[0] == "ValidationError.test_kept_inputs.run"


def test_marks_in_trees_become_what_no_encoder_writes() -> None:
    assert b"\x91" * DEPTH in write_msgpack({"x": NESTED})
    assert b"[" * DEPTH in write_json([NESTED])
    assert BROKEN.encode() not in write_json([BROKEN])
    with pytest.raises(UnicodeDecodeError):
        write_msgpack([BROKEN]).decode()
