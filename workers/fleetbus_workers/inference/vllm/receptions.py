"""Versions that a process of vLLM receives from the learner: a thread joins the group while the process samples.

Nothing that arrived is used before its digests were compared with those of the log. This module is imported by vLLM's
processes alone.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from fleetbus_schemas import TensorEntry
from fleetbus_workers.weights.collective.group import join
from fleetbus_workers.weights.collective.received import ReceivedVersion
from fleetbus_workers.weights.collective.stream import receive_version
from fleetbus_workers.weights.file import WeightsRejected
from fleetbus_workers.weights.transfer import TransferFailed

if TYPE_CHECKING:
    import torch

Manifest = tuple[TensorEntry, ...]


class _Reception:
    """One version on its way. ``version`` is there, or ``failure``, before ``ended`` is set."""

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self.ended = threading.Event()
        self.version: ReceivedVersion | None = None
        self.failure = ""

    def run(self, address: str, port: int, token: str, limit_bytes: int, seconds: float) -> None:
        """The body of the thread."""
        ends = time.monotonic() + seconds
        try:
            with closing(join(address, port, token)) as group:
                self.version = receive_version(group, limit_bytes=limit_bytes, ends=ends, is_over=self.given_up.is_set)
        except Exception as error:  # noqa: BLE001 - told to who asks; this thread is nobody's to end
            self.failure = str(error) if isinstance(error, TransferFailed) else f"{type(error).__name__}: {error}"
        finally:
            self.ended.set()


class Receptions:
    """By the offer's token; called by the thread that computes. Never waits."""

    def __init__(self) -> None:
        self._receptions: dict[str, _Reception] = {}

    def begin(self, address: str, port: int, token: str, limit_bytes: int, seconds: float) -> None:
        """Receive what is offered; of those before, the newest that is whole is kept."""
        whole = [name for name, each in self._receptions.items() if each.version is not None][-1:]
        for name, each in self._receptions.items():
            if name not in whole:
                each.given_up.set()
        reception = _Reception()
        self._receptions = {name: self._receptions[name] for name in whole} | {token: reception}
        arguments = (address, port, token, limit_bytes, seconds)
        threading.Thread(target=reception.run, args=arguments, name="weights-reception", daemon=True).start()

    def describe(self, token: str) -> str | None:
        """None while it is on its way, empty when it is whole, else why it will not be."""
        reception = self._receptions.get(token)
        if reception is None:
            return "this process was not there"
        return reception.failure if reception.ended.is_set() else None

    def give_up(self, token: str) -> None:
        """End a reception after its next piece."""
        if token in self._receptions:
            self._receptions[token].given_up.set()

    def check(self, token: str, manifest: bytes) -> str:
        """Empty if what came is what ``manifest`` (JSON) says, else the difference."""
        try:
            self._select(token, manifest)
        except WeightsRejected as rejected:
            return str(rejected)
        return ""

    def take(self, token: str, manifest: bytes) -> dict[str, torch.Tensor]:
        """The tensors, once. Raises `WeightsRejected`."""
        tensors = self._select(token, manifest)
        del self._receptions[token]
        return tensors

    def _select(self, token: str, manifest: bytes) -> dict[str, torch.Tensor]:
        reception = self._receptions.get(token)
        if reception is None or reception.version is None:
            raise WeightsRejected("this process has not received it")
        return reception.version.take_tensors("what the learner sent", msgspec.json.decode(manifest, type=Manifest))
