"""Programs of different versions in one run: who may work, what the others say, and how that is seen."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
import structlog.testing

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.nats.run_protocol import read_protocol
from fleetbus.bus.streams import plan_run
from fleetbus.delivery.protocol_wait import wait_for_protocol
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle
from fleetbus.errors import RequestUnanswered
from fleetbus.package_version import read_fleetbus_version
from fleetbus_schemas import Heartbeat, Subjects, WorkerStarted, decode
from fleetbus_schemas.protocol import NEEDED, OWN, PROTOCOL, ProtocolVersion, find_misfit
from fleetbus_workers.observe.run.versions import describe_versions

SUBJECTS = Subjects("r")
OLD = ProtocolVersion(protocol=1, needed=0)
READS = ProtocolVersion(protocol=2, needed=1)
WRITES = ProtocolVersion(protocol=2, needed=2)


def test_a_program_needs_no_more_of_others_than_it_has() -> None:
    assert 0 <= NEEDED <= PROTOCOL


def test_a_run_of_a_version_that_told_no_protocol_is_worked_in() -> None:
    assert find_misfit(OWN, ProtocolVersion(), "r") == ""


@pytest.mark.parametrize(
    ("own", "run", "words"),
    [
        (OLD, OLD, ""),
        (OLD, READS, ""),
        (READS, OLD, ""),
        (READS, WRITES, ""),
        (OLD, WRITES, "this worker is too old: it has protocol 1, run r needs 2: replace it"),
        (WRITES, OLD, "this worker is too new: it needs protocol 2, run r has 1: repeat `fleetbus init --run r`"),
    ],
)
def test_each_version_works_beside_the_one_before_it_and_no_older_one(
    own: ProtocolVersion, run: ProtocolVersion, words: str
) -> None:
    misfit = find_misfit(own, run, "r")
    assert misfit.startswith(words) and bool(misfit) == bool(words) and "\n" not in misfit


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", "²", "9" * 5000])
def test_what_is_no_number_in_the_metadata_of_a_log_is_0(text: str) -> None:
    config = {"metadata": {"fleetbus_protocol": text, "fleetbus_needed_protocol": text}}
    assert read_protocol(config) == read_protocol({}) == read_protocol({"metadata": None}) == ProtocolVersion()


async def wait(run: Sequence[ProtocolVersion | Exception], own: ProtocolVersion) -> tuple[bool, list[str], list[Heartbeat]]:
    """Outcome, lines and heartbeats of a worker that asks for one protocol after the other, and is drained after the last."""
    told, drain, beats = list(run), anyio.Event(), []
    async with MemoryServer().connect("r") as bus, bus.listen(SUBJECTS.heartbeats) as heard:
        await bus.declare(plan_run("r"))

        async def read_run() -> ProtocolVersion:
            found = told.pop(0)
            if not told:
                drain.set()
            if isinstance(found, Exception):
                raise found
            return found

        with structlog.testing.capture_logs() as lines:
            fits = await wait_for_protocol(bus, read_run, SUBJECTS, role="inference", worker="i", drain=drain, own=own)
        while True:
            with anyio.move_on_after(0.01) as scope:
                subject, payload = await heard.receive()
                beats.append(decode(Heartbeat, payload, subject=subject))
            if scope.cancelled_caught:
                break
        assert (await bus.log_state()).last_sequence == 0
    return fits, [line["event"] for line in lines], beats


async def test_a_worker_that_fits_begins_without_a_word() -> None:
    assert await wait([OLD], OLD) == (True, [], [])


@pytest.mark.integration
async def test_a_worker_that_is_too_new_says_so_once_and_begins_when_the_run_was_declared_by_its_version() -> None:
    fits, lines, beats = await wait([OLD, OLD, RequestUnanswered("no answer"), OLD, WRITES], WRITES)
    assert fits
    assert [line.split(":")[0] for line in lines[:-1]] == ["waiting"] * 3 and lines[-1].endswith("beginning")
    assert "too new" in lines[0] and "no answer" in lines[1]
    assert len(beats) == 4 and beats[0].problem in lines[0] and beats[0].protocol == 2


@pytest.mark.integration
async def test_a_worker_that_is_too_old_takes_no_work_and_ends_when_it_is_drained() -> None:
    fits, lines, beats = await wait([WRITES, WRITES], OLD)
    assert (fits, len(lines), beats[0].slots) == (False, 1, 0) and "too old" in lines[0]


async def test_a_worker_tells_its_version_and_protocol_in_the_log_and_in_every_heartbeat() -> None:
    async with MemoryServer().connect("r") as bus, bus.listen(SUBJECTS.heartbeats) as heard:
        await bus.declare(plan_run("r"))
        beat = Heartbeat(role="learner", worker="l")
        lifecycle = WorkerLifecycle(bus, SUBJECTS, role="learner", worker="l", beat=lambda: beat, lane=None)
        await lifecycle.publish_started(slots=1)
        await lifecycle.publish_heartbeat()
        entry = await bus.last(SUBJECTS.life("learner", "l"))
        assert entry is not None
        started = decode(WorkerStarted, entry.payload, subject=entry.subject)
        subject, payload = await heard.receive()
        said = decode(Heartbeat, payload, subject=subject)
    assert (started.version, started.protocol) == (said.version, said.protocol) == (read_fleetbus_version(), PROTOCOL)


def test_versions_are_shown_where_they_differ_and_only_there() -> None:
    new = [Heartbeat(role="environment", worker=f"e{index}", version="0.4.0", protocol=2) for index in range(5)]
    old = Heartbeat(role="learner", worker="lea")
    assert describe_versions(new) == describe_versions([]) == describe_versions([old]) == ""
    assert describe_versions([old, *new]) == ("versions differ: 0.4.0, protocol 2: e0, e1, e2 and 2 more; 0.3.0 or before: lea")


def test_what_a_key_says_of_its_version_is_cut_and_writes_nothing_else_to_a_terminal() -> None:
    rogue = [
        Heartbeat(role="environment", worker=f"e{index}", version=f"{index}\x1b[2J\n" * 500, protocol=1) for index in range(99)
    ]
    shown = describe_versions([Heartbeat(role="learner", worker="l"), *rogue])
    assert shown.isprintable() and len(shown) < 300
    assert shown.endswith(" and 97 more")
