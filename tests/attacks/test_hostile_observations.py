"""An environment worker's key asks for Actions with what no environment worker says: no inference worker ends by it."""

from __future__ import annotations

import math

import anyio
import msgspec
import pytest

from fleetbus_schemas import MAX_MESSAGE_BYTES, ChatMessage, Observation, SamplingSettings, encode
from fleetbus_schemas.segment import SegmentOrigin
from tests.support.small_deployment import small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

ASKED = Observation(
    episode_id="e",
    attempt=1,
    turn=0,
    policy="default",
    messages=(ChatMessage(role="user", content="hi"),),
    tokens_left=1000,
    environment_lane="lane-0",
    deadline_ns=2**62,
)
LONGEST = MAX_MESSAGE_BYTES - len(encode(ASKED)) - 16
"""Of one field, so that the message is as long as it may be."""

CASES: dict[str, dict[str, object]] = {
    "a hash of a megabyte": {"history_hash": b"x" * LONGEST, "messages": ()},
    "a hash of a megabyte, sent round too often": {"history_hash": b"x" * LONGEST, "messages": (), "hop": 100},
    "a seat of a megabyte": {"seat": "x" * LONGEST},
    "a message of a megabyte": {"messages": (ChatMessage(role="user", content="\0" * LONGEST),)},
    "tokens without end": {"tokens_left": 2**63 - 1, "sampling": SamplingSettings(max_tokens=2**63 - 1)},
    "fewer tokens than none": {"tokens_left": -(2**63)},
    "a temperature that is no number": {"sampling": SamplingSettings(temperature=math.nan)},
    "a version that nobody has": {"pinned_version": 2**63},
    "a segment that leaves nothing": {"origin": SegmentOrigin(parent=5, kept=-5, reason="history_edited")},
    "a segment beyond its parent": {"origin": SegmentOrigin(parent=-1, kept=2**62, reason="history_edited", repeated=2**62)},
    "an Action expected before the first": {"action_sequence": -1},
    "a history that nobody has": {"history_hash": b"x" * 16},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
async def test_no_observation_ends_an_inference_worker(fields: dict[str, object]) -> None:
    async with small_deployment() as fleet:
        worker = fleet.inference("i1")
        await fleet.heard(worker)
        subject = fleet.subjects.observation("default", "any", "e")
        await fleet.bus.publish(subject, encode(msgspec.structs.replace(ASKED, **fields)))
        with anyio.move_on_after(120):
            await worker.ended.wait()
        assert not worker.ended.is_set(), worker.error
