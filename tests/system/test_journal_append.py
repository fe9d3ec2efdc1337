"""A journal entry is stored once, and whoever stored it learns of that, however the server answers in between."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fleetbus.bus.base import Bus
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import PublishUnanswered, RequestUnanswered
from fleetbus_schemas import SessionClaimed, Subjects, Task
from fleetbus_workers.environment.episode.stages import Superseded
from fleetbus_workers.environment.stepwise.journal_log import append, read_session_journal
from fleetbus_workers.replay.fixtures import memory_bus
from tests.support.virtual_time import virtual_time

SUBJECTS = Subjects("run")

anyio_backend = virtual_time


class Silent:
    """A bus whose next answers, as many as ``answers`` says, get lost; what was asked is done all the same."""

    def __init__(self, bus: Bus, answers: int) -> None:
        self._bus = bus
        self._answers = answers

    def _answered(self) -> bool:
        self._answers -= 1
        return self._answers < 0

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Any:
        published = await self._bus.publish(subject, payload, **options)
        if not self._answered():
            raise PublishUnanswered(subject)
        return published

    async def last(self, subject: str) -> Any:
        if not self._answered():
            raise RequestUnanswered(subject)
        return await self._bus.last(subject)


def claimed(nonce: str) -> SessionClaimed:
    return SessionClaimed(session="s", attempt=1, worker="w", nonce=nonce, task=Task(key="t"))


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
async def test_an_entry_whose_answers_were_lost_is_known_as_ones_own(answers: int) -> None:
    with anyio.fail_after(1000):
        async with memory_bus("run") as bus:
            journal = Journal()
            await append(Silent(bus, answers), SUBJECTS, "s", journal, claimed("mine"))  # type: ignore[arg-type]
            assert journal == await read_session_journal(bus, SUBJECTS, "s")
            with pytest.raises(Superseded):
                await append(Silent(bus, answers), SUBJECTS, "s", Journal(), claimed("another"))  # type: ignore[arg-type]
