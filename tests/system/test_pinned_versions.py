"""A turn that is pinned to a version of the policy: it waits for one that was published, and for no other."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus_schemas import Action, LineageStarted, Message, PolicyPublished, Subjects, decode, encode
from fleetbus_workers.inference.base import WeightsRejected
from fleetbus_workers.inference.pinned_versions import UNPUBLISHED_SECONDS
from fleetbus_workers.inference.scripted import ScriptedSampler
from tests.support.single_engine import inference_worker, make_first_observation
from tests.support.virtual_time import virtual_time

RUN = "pinned"
SUBJECTS = Subjects(RUN)
POLICY = SUBJECTS.policy("default")

anyio_backend = virtual_time


def published(version: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default", version=version, lineage="l1", step=version, uri="file:///none", manifest=(), size_bytes=0
    )


class SlowlyLoaded(ScriptedSampler):
    """Takes version 1 at the third try only, a minute and a half after it was published."""

    tries = 0

    async def load(self, published: PolicyPublished) -> None:
        if published.version == 1:
            self.tries += 1
            await anyio.sleep(30)
            if self.tries < 3:
                raise WeightsRejected("not there yet")
        await super().load(published)


async def ask(bus: MemoryBus, sampler: ScriptedSampler, *entries: Message, pinned: int) -> tuple[Action, float]:
    """The answer to a turn pinned to that version, which is asked for once ``entries`` stand on the policy's subject; and the
    seconds that it took."""
    observation = msgspec.structs.replace(make_first_observation(bus), pinned_version=pinned)
    with anyio.fail_after(600):
        async with bus.read([SUBJECTS.action("e0", "e")], start=1) as read, inference_worker(bus, RUN, sampler):
            for entry in entries:
                await bus.publish(POLICY, encode(entry))
            await bus.publish(SUBJECTS.observation("default", "any", "e"), encode(observation))
            asked = anyio.current_time()
            return decode(Action, (await read.receive()).payload), anyio.current_time() - asked


async def test_a_version_that_was_never_published_is_not_waited_for_until_the_deadline() -> None:
    begun = LineageStarted(lineage="l2", worker="w")
    for entries in ((published(0),), (published(0), begun)):
        server = MemoryServer()
        server.declare(plan_run(RUN, lanes=2))
        async with server.connect(RUN, worker="test") as bus:
            answer, seconds = await ask(bus, ScriptedSampler(), *entries, pinned=1)
        assert (answer.finish_reason, answer.error_class) == ("failed", "version_gone")
        assert "version 1 is pinned, and was never published" in answer.error
        assert seconds < UNPUBLISHED_SECONDS + 1


async def test_a_version_that_was_published_is_waited_for_however_long_it_takes_to_load() -> None:
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        answer, seconds = await ask(bus, SlowlyLoaded(), published(0), published(1), pinned=1)
    assert (answer.finish_reason, [span.version for span in answer.versions]) == ("stop", [1])
    assert seconds > 2 * UNPUBLISHED_SECONDS


async def test_a_version_that_a_replica_does_not_know_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryServer()
    server.declare(plan_run(RUN, lanes=2))
    async with server.connect(RUN, worker="test") as bus:
        last, begun = bus.last, anyio.current_time()

        async def behind(subject: str) -> StreamEntry | None:
            found = await last(subject)
            if subject == POLICY and anyio.current_time() - begun < UNPUBLISHED_SECONDS / 2:
                return None
            return found

        monkeypatch.setattr(bus, "last", behind)
        answer, _ = await ask(bus, SlowlyLoaded(), published(0), published(1), pinned=1)
    assert answer.finish_reason == "stop"
