"""Processes of a deployment that is measured: one that should have ended and goes on is written down."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from benchmarks.deployed_processes import Place
from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone

UNTIL_REFUSED = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ends", [True, False])
async def test_a_process_that_should_end_and_goes_on_is_written_down(tmp_path: Path, ends: bool) -> None:
    """A viewer whose key was replaced was expected to end, and nobody looked."""
    is_refused = tmp_path / "refused"
    place = Place("viewer", [sys.executable, "-c", UNTIL_REFUSED, str(is_refused)], tmp_path, is_named=False)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(place.keep_running)
            await place.wait_until_restarted()
            place.expect_end()
            place.hold()
            if ends:
                is_refused.touch()
            await place.wait_until_ended(30 if ends else 0.2)
            place.release()
            await place.retire()
            tasks.cancel_scope.cancel()
    assert [death.said for death in place.deaths] == ([] if ends else ["it goes on 0.2 s after it should have ended"])
