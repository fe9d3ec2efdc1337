"""Writing the entries of a backup into an empty log, each at the position that it had, for messages and books name positions.

Entries get the time at which they are restored, so that another archive has to follow. A restore that ended midway is continued
by repeating it. Nobody else may write to the log meanwhile. Above it is the command line
(docs/decisions/0230-a-log-is-restored-by-position.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.streams import RunPlan
from fleetbus.errors import LogFull, UserError
from fleetbus_schemas import Subjects


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The log has the entries from ``begins`` to ``last``, ``stored`` of which were written now, from run ``source``."""

    run: str
    source: str
    begins: int
    last: int
    stored: int


async def restore_log(
    bus: Bus, plan: RunPlan, entries: AsyncGenerator[StreamEntry], *, begins: int, only_needed: bool = False
) -> Restored:
    """Declare the run and store the entries from position ``begins`` on, without a gap, under the name of the plan's run;
    ``only_needed`` says that those before are left out.

    Raises `UserError` where the run has another log already, the entries have a gap or do not fit, or another process writes to
    the log at the same time; and `BusError`. What was stored by then stays, and a repetition goes on behind it.
    """
    await bus.declare(msgspec.structs.replace(plan, log=msgspec.structs.replace(plan.log, first_sequence=begins)))
    writer = _Writer(bus, plan.run, begins, (await bus.log_state()).last_sequence, only_needed)
    async with aclosing(entries):
        async for entry in entries:
            if entry.sequence >= begins:
                await writer.write(entry)
    return writer.finish()


class _Writer:
    def __init__(self, bus: Bus, run: str, begins: int, found: int, only_needed: bool) -> None:
        self._bus = bus
        self._run = run
        self._begins = begins
        self._found = found
        """The last entry that was there before."""
        self._next = begins
        self._other_way = "" if only_needed else ", or begin behind them with --only-needed"
        self._source = ""
        self._stored = 0

    async def write(self, entry: StreamEntry) -> None:
        if entry.sequence != self._next:
            raise UserError(
                f"entries {self._next} to {entry.sequence - 1} are missing in what is to be restored: add the folder or store "
                f"that has them{self._other_way}"
            )
        _, self._source, rest = entry.subject.split(".", 2)
        subject = f"{Subjects(self._run).log.removesuffix('>')}{rest}"
        self._next += 1
        if entry.sequence == self._found:
            there = await self._bus.next_entry(Subjects(self._run).log, start=entry.sequence)
            if there is None or (there.sequence, there.subject, there.payload) != (entry.sequence, subject, entry.payload):
                raise self._refuse_other()
        if entry.sequence > self._found:
            await self._store(entry, subject)

    def finish(self) -> Restored:
        if self._next == self._begins:
            raise UserError("there is no entry to restore: give the folder that `fleetbus recorder --archive` writes to")
        if self._found >= self._next:
            raise self._refuse_other()
        return Restored(run=self._run, source=self._source, begins=self._begins, last=self._next - 1, stored=self._stored)

    async def _store(self, entry: StreamEntry, subject: str) -> None:
        try:
            acked = await self._bus.publish(subject, entry.payload)
        except LogFull as full:
            raise UserError(
                f"the log of run {self._run} is full at entry {entry.sequence}: raise --nats-max-bytes and repeat this, or "
                f"remove it (fleetbus runs rm {self._run}) and restore --only-needed"
            ) from full
        self._stored += 1
        if acked.sequence != entry.sequence:
            raise UserError(
                f"entry {entry.sequence} was stored at {acked.sequence}, because another process writes to the log of run "
                f"{self._run}: stop all of its workers, remove it (fleetbus runs rm {self._run}) and repeat this"
            )

    def _refuse_other(self) -> UserError:
        return UserError(
            f"run {self._run} has another log on this server, up to entry {self._found}: choose another --run, or remove it "
            f"first (fleetbus runs rm {self._run})"
        )
