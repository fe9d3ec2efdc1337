"""An engine that returns given texts, and its template: for tests of environments and of whole runs."""

from collections import OrderedDict
from collections.abc import Sequence

import anyio

from fleetbus_schemas import VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedTemplate, StubSampler

STOP = 256
"""One id per UTF-8 byte, and one that ends a turn."""

MAX_TRACKED_EPISODES = 65_536


class CannedTemplate(ScriptedTemplate):
    """One token id per UTF-8 byte: sampled ids decode to the given text."""

    stop_ids: frozenset[int] = frozenset({STOP})

    def decode_text(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < STOP).decode("utf-8", "replace")


class CannedSampler(StubSampler):
    """`Sampler` that returns ``texts`` in order, one per turn of each episode, then repeats the last one.

    A text longer than the turn's tokens is cut with finish reason ``length``.
    """

    def __init__(self, *texts: str) -> None:
        if not texts:
            raise ValueError("a canned policy needs at least one text")
        self.template = CannedTemplate()
        self._texts = [text.encode() for text in texts]
        self._turns: OrderedDict[str, int] = OrderedDict()

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.lowlevel.checkpoint()
        turn = self._turns.pop(request.cache_key, 0)
        self._turns[request.cache_key] = turn + 1
        if len(self._turns) > MAX_TRACKED_EPISODES:
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
