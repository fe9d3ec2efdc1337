"""The audit of a deployment's log: its books balance, and what was trained is what was sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import StreamEntry
from fleetbus_workers.learner.digest_audit import audit_digests
from tests.support.small_deployment import SmallDeployment


async def expect_balance(fleet: SmallDeployment) -> int:
    """The number of episodes that were trained, counted for each policy."""
    report = await audit_run(fleet.bus, fleet.subjects)
    assert report.balanced, report.findings
    log = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]

    async def scan() -> AsyncIterator[StreamEntry]:
        for entry in log:
            yield entry

    proof = await audit_digests(scan, last_sequence=log[-1].sequence)
    assert not proof.findings and proof.proven == report.books.trained
    return report.books.trained
