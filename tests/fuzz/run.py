"""Fuzz one target, guided by the coverage of our code: ``just fuzz TARGET [seconds]``. Needs atheris.

    just fuzz recordings 3600      # an hour
    just fuzz all 60               # a minute for each

Inputs that reach something new stay in build/fuzz/TARGET/corpus. An input that is not refused by an error of the project's own,
or takes more than `MAX_SECONDS`, is a finding: the smallest of a name, which says what happened, is kept in
build/fuzz/TARGET/found, and fuzzing goes on. One that takes a gibibyte or hangs ends libFuzzer's process, which leaves it in
build/fuzz/TARGET/stopped and is started anew. What was mended is moved into tests/fuzz/crashes, where an ordinary test reads it
again. ``--keep`` writes the smallest of the inputs that reached something new into tests/fuzz/corpora. Exits with 1 if there is
a finding.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from tests.fuzz.mutation import mutate_tree
from tests.fuzz.targets import CORPORA, MAX_INPUT_BYTES, ROOT, TARGETS, find_fault, list_kept, load_target

BUILD = ROOT / "build/fuzz"
SLICE_SECONDS = 900
"""A process is replaced after so long: what libraries keep for good is no leak of ours."""

MEMORY_MB = 1024
HANG_SECONDS = 30
"""Wall time of one input: more than what is a finding by CPU time, for machines that are busy."""

KEPT_BYTES, ENTRY_BYTES = 60_000, 130
"""Of a kept corpus, and what an input takes in it besides its content."""

PACKAGES = ("fleetbus", "fleetbus_schemas", "fleetbus_workers")


class Tally(NamedTuple):
    """The sums over a run of one target."""

    executions: int = 0
    edges: int = 0
    features: int = 0


def fuzz(name: str, seconds: float) -> int:
    """Fuzz a target; returns the number of findings."""
    folder = BUILD / name
    silence_logs()
    for each in ("corpus", "found", "stopped"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    for file in (folder / "found").iterdir():
        if file.suffix != ".txt" and not find_fault(load_target(name), file.read_bytes()):
            file.unlink()  # mended since
            file.with_name(f"{file.name}.txt").unlink(missing_ok=True)
    kept = [("seed", seed) for seed in load_target(name).list_seeds()] + list(list_kept(name))
    for number, (_, data) in enumerate(kept):
        (folder / f"corpus/kept-{number}").write_bytes(data)
    tally, end = Tally(), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 1:
        tally = run_slice(name, min(left, SLICE_SECONDS), tally)
        print(f"{name}: {tally.executions} executions, {tally.edges} edges, {tally.features} features", flush=True)
    found = [file for each in ("found", "stopped") for file in sorted((folder / each).iterdir()) if file.suffix != ".txt"]
    print(f"{name}: {seconds:.0f} s, {len(list((folder / 'corpus').iterdir()))} inputs, {len(found)} findings")
    for file in found:
        print(f"  {file.relative_to(ROOT)}")
    return len(found)


def run_slice(name: str, seconds: float, tally: Tally) -> Tally:
    """One process of libFuzzer."""
    folder = BUILD / name
    words = [
        f"-max_total_time={max(int(seconds), 1)}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={HANG_SECONDS}",
        f"-report_slow_units={HANG_SECONDS}",
        f"-max_len={getattr(load_target(name), 'MAX_BYTES', MAX_INPUT_BYTES)}",
        f"-artifact_prefix={folder}/stopped/",
        "-print_final_stats=1",
        "-reload=0",
        str(folder / "corpus"),
    ]
    command = [sys.executable, "-m", "tests.fuzz.run", "--slice", name, *words]
    log = folder / "log.txt"
    with log.open("ab") as output:
        begin = output.tell()
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    text = log.read_bytes()[begin:].decode(errors="replace")
    seen = [(int(number), int(edges), int(features)) for number, edges, features in re.findall(
        r"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", text, re.MULTILINE)]  # fmt: skip
    if not seen:
        raise SystemExit(f"{name}: libFuzzer did not start: see {log}\n{text[-2000:]}")
    number, edges, features = map(max, zip(*seen, strict=True))
    return Tally(tally.executions + number, max(tally.edges, edges), max(tally.features, features))


def run_fuzzer(name: str, words: list[str]) -> None:
    """The process that fuzzes: does not return."""
    import atheris  # type: ignore[import-untyped,import-not-found]  # of .venv-fuzz alone

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=list(PACKAGES)):
        target = load_target(name)
    silence_logs()
    found = BUILD / name / "found"

    def take(data: bytes) -> None:
        if fault := find_fault(target, data):
            keep_smallest(found, data, fault)

    parse, write = getattr(target, "TREE", (None, bytes))

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if parse is None or chance.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        try:
            changed: bytes = write(mutate_tree(parse(data), chance))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
            return bytes(atheris.Mutate(data, max_size))
        return changed if len(changed) <= max_size else bytes(atheris.Mutate(data, max_size))

    atheris.Setup([sys.argv[0], *words], take, custom_mutator=mutate)
    atheris.Fuzz()


def silence_logs() -> None:
    """Warnings about entries are not what is looked for, and writing them takes longer than reading the entries."""
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def keep_smallest(folder: Path, data: bytes, fault: str) -> None:
    """Keep an input by the name of its fault, unless a smaller one has that."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", fault.partition("\n")[0])
    file = folder / name
    if not file.exists() or len(data) < file.stat().st_size:
        file.write_bytes(data)
        file.with_name(f"{name}.txt").write_text(fault)


def keep_corpus(name: str) -> None:
    """Write the inputs that reached something new when they came into one file, the smallest first, as many as fit."""
    CORPORA.mkdir(exist_ok=True)
    corpus, size = CORPORA / f"{name}.zip", 0
    files = [file for file in (BUILD / name / "corpus").iterdir() if not file.name.startswith("kept-")]
    with ZipFile(corpus, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(files, key=lambda file: (file.stat().st_size, file.name)):
            content = file.read_bytes()
            size += len(zlib.compress(content, 9)) + ENTRY_BYTES
            if size > KEPT_BYTES:
                break
            archive.writestr(ZipInfo(file.name[:12]), content, ZIP_DEFLATED)  # no time: the same bytes every time
    print(f"{name}: {corpus.stat().st_size} bytes in {corpus.relative_to(ROOT)}")


def main(words: list[str]) -> int:
    if words[:1] == ["--slice"]:
        run_fuzzer(words[1], words[2:])
    parser: Any = argparse.ArgumentParser(prog="just fuzz", description="Fuzz what reads the bytes of others.")
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("seconds", nargs="?", type=float, default=60.0, help="for each target")
    parser.add_argument("--keep", action="store_true", help="write the corpus into tests/fuzz/corpora afterwards")
    chosen = parser.parse_args(words)
    names, started = TARGETS if chosen.target == "all" else (chosen.target,), time.monotonic()
    failed = 0
    for name in names:
        failed += fuzz(name, chosen.seconds) > 0
        if chosen.keep:
            keep_corpus(name)
    seconds = time.monotonic() - started
    print(f"{len(names) - failed} passed, {failed} failed in {seconds:.2f}s")  # as pytest counts, for the table of groups
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
