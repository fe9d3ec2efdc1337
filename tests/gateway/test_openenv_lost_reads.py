"""A named session of the OpenEnv gateway goes on after a read of its journal that was not answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fleetbus.bus.base import Bus
from fleetbus.core.episode.journal import Journal
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import Subjects
from fleetbus_workers.environment.stepwise.journal_log import read_session_journal
from fleetbus_workers.gateway.openenv_episode import OpenEnvEpisode
from fleetbus_workers.gateway.openenv_frames import FrameError
from tests.support.stepwise_fixtures import SessionFixture, World, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


def open_gateway(here: SessionFixture) -> OpenEnvEpisode:
    return OpenEnvEpisode(here.client, capacity_seconds=60, call_seconds=60, name="n")


class UnansweredReads:
    """The next reads of a journal are not answered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        patch.setattr("fleetbus_workers.gateway.openenv_episode.read_session_journal", self._read)

    async def _read(self, bus: Bus, subjects: Subjects, session: str) -> Journal:
        if self.left:
            self.left -= 1
            raise RequestUnanswered("the server did not answer")
        return await read_session_journal(bus, subjects, session)


@asynccontextmanager
async def two_gateways(patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[OpenEnvEpisode, OpenEnvEpisode, UnansweredReads]]:
    """Of one session, and what leaves their reads unanswered."""
    reads = UnansweredReads(patch)
    async with session_fixture() as here:
        here.worker("w1", World())
        yield open_gateway(here), open_gateway(here), reads


async def test_a_step_is_repeated_after_a_read_that_was_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_gateways(monkeypatch) as (first, second, reads):
        await first.reset({"seed": 0})
        await second.attach()
        await second.step({"text": "a"}, request_id="1")
        reads.left = 1
        with pytest.raises(RequestUnanswered):
            await first.step({"text": "b"}, request_id="2")
        assert first.is_active
        again = await first.step({"text": "b"}, request_id="2")
        assert again["observation"]["messages"][0]["content"] == "2: b"
        assert first.steps == 2


async def test_a_reset_whose_environment_another_gateway_opened_meanwhile_is_repeated_after_a_read_that_was_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_gateways(monkeypatch) as (first, second, reads):
        await second.reset({"seed": 0})
        await second.close()
        reads.left = 1
        with pytest.raises(RequestUnanswered):
            await first.reset({"seed": 7})
        assert not first.is_active
        with pytest.raises(FrameError):  # the environment that it found is over
            await first.reset({"seed": 7})
        start = await first.reset({"seed": 7})
        assert start["observation"]["messages"][0]["content"] == "start 7"
