"""An engine that says given texts, and the template to go with it: for tests of environments and of whole fleets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import anyio

from fleetbus_schemas import VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedTemplate, WithoutModel

STOP = 256
"""One id per UTF-8 byte, and one that ends a turn."""

KEPT_EPISODES = 65_536


class SpokenTemplate(ScriptedTemplate):
    """One id per byte: what the policy says comes out as the text that was given."""

    stop_ids: frozenset[int] = frozenset({STOP})

    def text(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < STOP).decode("utf-8", "replace")


class SpokenSampler(WithoutModel):
    """`Sampler` that says ``texts`` in order, one per turn of each episode, and the last one again when they are used up.

    A text longer than the turn's tokens is cut with finish reason ``length``.
    """

    def __init__(self, *texts: str) -> None:
        if not texts:
            raise ValueError("a scripted policy needs at least one text to say")
        self.template = SpokenTemplate()
        self._texts = [text.encode() for text in texts]
        self._turns: OrderedDict[str, int] = OrderedDict()

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.lowlevel.checkpoint()
        turn = self._turns.pop(request.cache_key, 0)
        self._turns[request.cache_key] = turn + 1
        if len(self._turns) > KEPT_EPISODES:
            self._turns.popitem(last=False)
        whole = [*self._texts[min(turn, len(self._texts) - 1)], STOP]
        ids = whole[: request.max_tokens]
        return Generation(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            finish_reason="stop" if len(ids) == len(whole) else "length",
            versions=(VersionSpan(version=self.version, start=0, stop=len(ids)),),
        )

    def forget(self, cache_key: str) -> None:
        self._turns.pop(cache_key, None)
