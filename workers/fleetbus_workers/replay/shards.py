"""One recording replayed by several processes, each with its share of the episodes, and one report of what all of them found.

Above it is `replay_recording`; below it `python -m fleetbus_workers.replay.shards` per share, which gets its job on standard
input and answers with its report on standard output, both pickled: they are the same program. Cancelling kills the processes.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import anyio
import msgspec

from fleetbus.errors import UserError
from fleetbus.python_process import build_module_command
from fleetbus.recording import Recording, RecordingReader, read_header
from fleetbus_workers.replay.adapters import Replay, replay_here
from fleetbus_workers.replay.progress import Progress, follow, note_all, progress_pipe, telling, telling_parent
from fleetbus_workers.replay.quiet import collecting_seldom
from fleetbus_workers.replay.report import UNLOADED, Report

WORTH_SHARING_BYTES = 1 << 20
"""A smaller file is replayed by one process: others would take longer to start than they save."""

MOST_JOBS = 32
PARENT_CHECK_SECONDS = 1.0
_GROUPED = re.compile(r"(g\d+)-\d+")
EPISODE_KINDS = frozenset({"task", "obs", "act", "episode"})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Share ``number`` of ``count`` of a recording; ``path`` is the import path of the asking process, ``pipe`` where it hears
    of progress."""

    file: Path
    replay: Replay
    number: int
    count: int
    path: list[str]
    pipe: int


def jobs_for(file: Path, replay: Replay) -> int:
    """How many processes replay it: as many as are asked for, otherwise one per CPU if that is worth it."""
    if replay.jobs:
        return min(replay.jobs, MOST_JOBS)
    if replay.speed is not None or not can_be_shared(replay) or file.stat().st_size < WORTH_SHARING_BYTES:
        return 1
    return min(_cpus(), MOST_JOBS)


def can_be_shared(replay: Replay) -> bool:
    """False for what only this process has, and for the learner, to whom all episodes belong together."""
    return replay.role != "learner" and not callable(replay.environment)


async def replay_shared(file: Path, replay: Replay, jobs: int, progress: Progress | None = None) -> Report:
    """The report of all shares, whose progress is added up; raises `UserError` when one cannot be replayed."""
    read_header(file)  # what is no recording is said once, and at once
    reports: list[Report | UserError] = []

    async def run(number: int) -> None:
        job = Job(file=file, replay=replay, number=number, count=jobs, path=sys.path, pipe=write)
        reports.append(await _answer(job))

    progress = progress or Progress()
    with progress_pipe() as (read, write):
        async with anyio.create_task_group() as group:
            group.start_soon(follow, read, progress)
            async with anyio.create_task_group() as shares:
                for number in range(jobs):
                    shares.start_soon(run, number)
            group.cancel_scope.cancel()
        note_all(read, progress)
    return merge([_report(each) for each in reports])


def merge(reports: list[Report]) -> Report:
    """One report of all shares. Differences stand in the order of the log, whichever process found them."""
    first, *others = reports
    merged = msgspec.structs.replace(first, differences=list(first.differences), measured=dict(first.measured))
    for report in others:
        merged.compared += report.compared
        merged.skipped = _skipped(merged.skipped, report.skipped)
        merged.notes += report.notes
        merged.measured |= {what: merged.measured.get(what, 0.0) + seconds for what, seconds in report.measured.items()}
        merged.differences += report.differences
    merged.differences.sort(key=lambda each: (each.sequence, each.episode_id))
    merged.jobs = len(reports)
    return merged


def _skipped(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """What both left out. Versions belong to no share: each process tries to load all of them."""
    either = one | other
    return Counter(
        {reason: either[reason] if reason.startswith(UNLOADED) else one[reason] + other[reason] for reason in either}
    )


def _report(answer: Report | UserError) -> Report:
    if isinstance(answer, UserError):
        raise answer
    return answer


async def _answer(job: Job) -> Report | UserError:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # as many processes as CPUs, one thread each
    command = build_module_command("fleetbus_workers.replay.shards")
    ended = await anyio.run_process(
        command, input=pickle.dumps(job), stderr=None, check=False, env={**os.environ, **threads}, pass_fds=(job.pipe,)
    )
    if ended.returncode:
        return UserError(f"a process that replays part {job.number + 1} of {job.count} ended with status {ended.returncode}")
    answer: Report | UserError = pickle.loads(ended.stdout)
    return answer


def _load_share(job: Job) -> tuple[Recording, float]:
    """The entries of this share's episodes and all that belong to none; and the seconds that the whole recording spans."""
    reader = RecordingReader(job.file)
    mine, first_ns, last_ns = [], 0, 0
    for entry in reader.entries():
        first_ns = first_ns or entry.time_ns
        last_ns = entry.time_ns
        _, _, kind, rest = entry.subject.split(".", 3)
        if kind not in EPISODE_KINDS or share_of(rest.rpartition(".")[2], job.count) == job.number:
            mine.append(entry)
    recording = Recording(
        path=job.file, header=reader.header, entries=mine, files=reader.files, objects=reader.objects, torn=reader.torn
    )
    return recording, (last_ns - first_ns) / 1e9


def share_of(episode_id: str, count: int) -> int:
    """Which share an episode belongs to, for every process alike. A learner's groups stay together: their episodes have much
    in common, which then is computed once."""
    grouped = _GROUPED.fullmatch(episode_id)
    return zlib.crc32((grouped[1] if grouped else episode_id).encode()) % count


def _work(job: Job) -> Report:
    recording, seconds = _load_share(job)
    replay = msgspec.structs.replace(job.replay, jobs=1)
    progress = Progress()

    async def play() -> Report:
        async with telling(telling_parent(job.pipe, job.number, progress)):
            return await replay_here(recording, replay, progress)

    with collecting_seldom():
        report = anyio.run(play, backend_options={"use_uvloop": os.name != "nt"})
    report.recorded_seconds = seconds
    return report


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """One share: a job in, a report out. What an environment prints goes to standard error. Ctrl-C is for the asking process,
    which kills this one; if it is killed itself, this one ends soon after."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        job: Job = pickle.loads(sys.stdin.buffer.read())
        sys.path[:] = job.path
        try:
            result: Report | UserError = _work(job)
        except UserError as error:
            result = UserError(str(error))
        pickle.dump(result, answer)


if __name__ == "__main__":
    from fleetbus_workers.replay.shards import main as run_share  # under its own name, as what is pickled refers to it

    run_share()
