"""The event loop's side of what vLLM's processes receive from the learner: asks all of them, and waits for all of them."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import msgspec

from fleetbus_schemas import PolicyPublished, WeightsOffered
from fleetbus_workers.weights.transfer import TransferFailed

POLL_SECONDS = 0.2
"""Between questions to the engine, which answers between its steps."""

GRACE_SECONDS = 60.0
"""Beyond a transfer's own limit: for joining, one step of a peer that stands still, and an engine that computes."""


async def receive(engine: Any, offered: WeightsOffered, *, limit_bytes: int, seconds: float, given_up: threading.Event) -> None:
    """Have all processes of ``engine`` receive a version, and wait for the end. Raises `TransferFailed` and what vLLM does."""
    arguments = (offered.address, offered.port, offered.token, limit_bytes, seconds)
    told = False
    try:
        with anyio.fail_after(seconds + GRACE_SECONDS):
            await engine.collective_rpc("begin_reception", args=arguments)
            while None in (states := await engine.collective_rpc("describe_reception", args=(offered.token,))):
                if given_up.is_set() and not told:
                    told = True
                    await engine.collective_rpc("give_up_reception", args=(offered.token,))
                await anyio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise TransferFailed("the engine does not say that it has ended") from error
    if failures := [state for state in states if state]:
        raise TransferFailed(failures[0])


async def find_difference(engine: Any, token: str, policy: PolicyPublished) -> str:
    """Empty if all processes hold what the log says of ``policy``, else the first difference."""
    found = await engine.collective_rpc("check_received", args=(token, encode_manifest(policy)))
    return next((each for each in found if each), "")


def encode_manifest(policy: PolicyPublished) -> bytes:
    """As `receptions` reads it."""
    return msgspec.json.encode(policy.manifest)
