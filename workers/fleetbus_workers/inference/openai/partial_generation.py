"""One turn's answer as it grows: ids, log-probabilities, and which version made them. Pure."""

import math
from collections.abc import Sequence

from fleetbus_schemas import FinishReason, VersionSpan
from fleetbus_workers.inference.base import Generation, GenerationRequest, RequestRefused
from fleetbus_workers.inference.openai.dialects import StreamChunk
from fleetbus_workers.inference.openai.model_server import ServerFailed

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class PartialGeneration:
    """The tokens streamed for ``request`` so far, from any number of servers and versions."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    def append_chunk(self, piece: StreamChunk, version: int) -> None:
        """Add a piece. Raises `ServerFailed` if ids and log-probabilities do not belong together, or the server gave up."""
        if len(piece.ids) != len(piece.logprobs):
            raise ServerFailed(f"{len(piece.ids)} token ids came with {len(piece.logprobs)} log-probabilities")
        room = self.request.max_tokens - len(self.ids)
        self.ids += piece.ids[:room]
        self._logprobs += piece.logprobs[:room]
        self._versions += [version] * len(piece.ids[:room])
        if self.ids and self.ids[-1] in self.request.stop_ids:
            self._finish_reason = "stop"
        elif len(self.ids) >= self.request.max_tokens:
            self._finish_reason = "length"
        elif piece.finish:
            self._set_finish_reason(piece.finish)

    def truncate(self, length: int) -> None:
        """Give back what came after the first ``length`` tokens."""
        del self.ids[length:], self._logprobs[length:], self._versions[length:]
        self._finish_reason = None

    def set_text(self, ids: Sequence[int], turn_end: int, finish: str, version: int) -> None:
        """Set the whole answer of a server that speaks text: its log-probabilities are unknown, and no text shows the stop
        token."""
        self.ids = [*ids, *([turn_end] if finish == "stop" else [])][: self.request.max_tokens]
        self._logprobs = [math.nan] * len(self.ids)
        self._versions = [version] * len(self.ids)
        self._set_finish_reason(finish)

    def _set_finish_reason(self, finish: str) -> None:
        if finish not in FINISH_REASONS:
            raise ServerFailed(f"the server ended the answer with {finish[:40]!r}")
        if not self.ids:
            raise RequestRefused("the server ended the answer without a token")
        self._finish_reason = FINISH_REASONS[finish]

    def build_generation(self) -> Generation:
        """The finished answer."""
        assert self._finish_reason is not None
        return Generation(
            ids=self.ids, logprobs=self._logprobs, finish_reason=self._finish_reason, versions=self._compute_spans()
        )

    def _compute_spans(self) -> tuple[VersionSpan, ...]:
        bounds = [index for index in range(1, len(self._versions)) if self._versions[index] != self._versions[index - 1]]
        starts, stops = [0, *bounds], [*bounds, len(self._versions)]
        return tuple(
            VersionSpan(version=self._versions[start], start=start, stop=stop)
            for start, stop in zip(starts, stops, strict=True)
            if stop > start
        )
