"""One recording replayed by several processes, each with its share of the episodes, and one report of what all of them found.

`python -m fleetbus_workers.replay.share_process` per share gets its job on standard input and writes frames to standard output:
a length in four bytes, then a pickle of its progress, its report or a `UserError`; both ends are the same program. Cancelling
kills the processes; one whose parent was killed ends when it next reports its progress.
"""

import gc
import os
import pickle
import re
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import UserError
from fleetbus.processors import count_processors
from fleetbus.python_process import build_module_command
from fleetbus.recording import Recording, RecordingReader, read_header
from fleetbus_workers.command.event_loop import run_async
from fleetbus_workers.replay.one_process import replay_here
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.progress import Progress, report_regularly
from fleetbus_workers.replay.report import UNLOADED, Report

WORTH_SHARING_BYTES = 1 << 20
"""A smaller file is replayed by one process: others would take longer to start than they save."""

MAX_JOBS = 32
_GROUPED = re.compile(r"(g\d+)-\d+")
_EPISODE_KINDS = frozenset({"task", "obs", "act", "episode"})
_SIZE_BYTES = 4


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Share ``number`` of ``count`` of a recording; ``path`` is the import path of the parent process."""

    file: Path
    replay: Replay
    number: int
    count: int
    path: list[str]


def count_jobs(file: Path, replay: Replay) -> int:
    """Number of processes that replay it: as many as are asked for, otherwise one per CPU if that is worth it. One for what
    only this process has, and for the learner, whose episodes belong together."""
    if replay.jobs:
        return min(replay.jobs, MAX_JOBS)
    is_whole = replay.role == "learner" or callable(replay.environment)
    if is_whole or replay.speed is not None or file.stat().st_size < WORTH_SHARING_BYTES:
        return 1
    return min(count_processors(), MAX_JOBS)


async def replay_shared(file: Path, replay: Replay, jobs: int, progress: Progress) -> Report:
    """The report of all shares, whose progress is added up; raises `UserError` when one cannot be replayed."""
    read_header(file)  # a file that is no recording is reported once, and at once
    reports: list[Report] = []

    async def run(number: int) -> None:
        reports.append(await _run_share(Job(file=file, replay=replay, number=number, count=jobs, path=sys.path), progress))

    async with open_first_error_task_group() as shares:
        for number in range(jobs):
            shares.start_soon(run, number)
    return merge_reports(reports)


async def _run_share(job: Job, progress: Progress) -> Report:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # as many processes as CPUs, one thread each
    command = build_module_command("fleetbus_workers.replay.share_process")
    async with await anyio.open_process(command, stderr=None, env={**os.environ, **threads}) as process:
        assert process.stdin is not None and process.stdout is not None
        frames = BufferedByteReceiveStream(process.stdout)
        try:
            await process.stdin.send(pickle.dumps(job))
            await process.stdin.aclose()
            while True:
                size = int.from_bytes(await frames.receive_exactly(_SIZE_BYTES), "big")
                message = pickle.loads(await frames.receive_exactly(size))
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, Report):
                    return message
                progress.note(job.number, *message)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            status = await process.wait()
    raise UserError(f"a process that replays part {job.number + 1} of {job.count} ended with status {status}")


def merge_reports(reports: list[Report]) -> Report:
    """One report of all shares. Differences are in the order of the log, whichever process found them."""
    first, *others = reports
    merged = msgspec.structs.replace(first, differences=list(first.differences), measured=dict(first.measured))
    for report in others:
        merged.compared += report.compared
        merged.skipped = _add_skipped(merged.skipped, report.skipped)
        merged.notes += report.notes
        merged.measured |= {what: merged.measured.get(what, 0.0) + seconds for what, seconds in report.measured.items()}
        merged.differences += report.differences
    merged.differences.sort(key=lambda each: (each.sequence, each.episode_id))
    merged.jobs = len(reports)
    return merged


def _add_skipped(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """Entries that both left out. Versions belong to no share: each process tries to load all of them."""
    either = one | other
    return Counter(
        {reason: either[reason] if reason.startswith(UNLOADED) else one[reason] + other[reason] for reason in either}
    )


def share_of(episode_id: str, count: int) -> int:
    """The share that an episode belongs to, the same in every process. A learner's groups stay together: their episodes have
    much in common, which is computed once."""
    grouped = _GROUPED.fullmatch(episode_id)
    return zlib.crc32((grouped[1] if grouped else episode_id).encode()) % count


def _load_share(job: Job) -> tuple[Recording, float]:
    """The entries of this share's episodes and all that belong to none; and the seconds that the whole recording spans."""
    reader = RecordingReader(job.file)
    own, first_ns, last_ns = [], 0, 0
    for entry in reader.entries():
        first_ns, last_ns = first_ns or entry.time_ns, entry.time_ns
        kind, name = entry.subject.split(".", 3)[2], entry.subject.rpartition(".")[2]
        if kind not in _EPISODE_KINDS or share_of(name, job.count) == job.number:
            own.append(entry)
    recording = Recording(
        path=job.file, header=reader.header, entries=own, files=reader.files, objects=reader.objects, torn=reader.torn
    )
    return recording, (last_ns - first_ns) / 1e9


def main() -> None:
    """Replay one share. What an environment prints goes to standard error. Ctrl-C is for the parent process, which kills this
    one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        job: Job = pickle.loads(sys.stdin.buffer.read())
        sys.path[:] = job.path

        def send(message: object) -> None:
            payload = pickle.dumps(message)
            output.write(len(payload).to_bytes(_SIZE_BYTES, "big") + payload)
            output.flush()

        async def play() -> Report:
            progress = Progress()

            async def report() -> None:
                send((progress.done, progress.total))

            async with report_regularly(report):
                return await replay_here(recording, msgspec.structs.replace(job.replay, jobs=1), progress)

        try:
            recording, seconds = _load_share(job)
            gc.freeze()  # what was loaded stays to the end: the collector need not look at it
            gc.set_threshold(50_000, 20, 100)
            answer = run_async(play)
            answer.recorded_seconds = seconds
            send(answer)
        except UserError as error:
            send(UserError(str(error)))
