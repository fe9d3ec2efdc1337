"""Prefix cache of keys and values: episode histories between turns, and prompts that many episodes share.

Everything here was computed under one version of the weights; a swap clears it. Bounded by number and by bytes, the least
recently used going first. Used by the engine's thread, except `forget`.
"""

import threading
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetbus_workers.inference.torch.slots import State
from fleetbus_workers.token_prefix import common_prefix_length

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class CacheEntry:
    """The state of ``ids``, up to ``state.stop``. Before ``state.start`` they are the engine's reference prompt."""

    ids: Ids
    state: State

    def count_covered(self, ids: Ids) -> int:
        """Number of tokens of ``ids`` that this state covers; the last one is never covered, because its logits are wanted."""
        return min(common_prefix_length(ids, self.ids), self.state.stop, len(ids) - 1)


class LRUCache:
    """A bounded dictionary that drops what was used least recently."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit = limit
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._entries: dict[str | bytes, CacheEntry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[CacheEntry]:
        with self._lock:
            return list(self._entries.values())

    def put(self, key: str | bytes, entry: CacheEntry) -> None:
        with self._lock:
            self._remove(key)
            self._entries[key] = entry
            self._bytes += entry.state.size_bytes
            while self._entries and (len(self._entries) > self.limit or self._bytes > self._limit_bytes):
                self._remove(next(iter(self._entries)))

    def get(self, key: str | bytes) -> CacheEntry | None:
        """The entry under ``key``, now the most recently used."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
            return entry

    def pop(self, key: str | bytes) -> CacheEntry | None:
        """The entry under ``key``, no longer kept."""
        with self._lock:
            return self._remove(key)

    def remove_all(self, key: str, prefix: str) -> None:
        """Drop the entry under ``key``, and those whose key begins with ``prefix``."""
        with self._lock:
            for each in [each for each in self._entries if each == key or (isinstance(each, str) and each.startswith(prefix))]:
                self._remove(each)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _remove(self, key: str | bytes) -> CacheEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.state.size_bytes
        return entry


class PrefixCache:
    """Histories by cache key and shared prompts of the current version; a limit of 0 keeps none."""

    def __init__(self, *, histories: int, prompts: int, limit_bytes: int) -> None:
        self.histories = LRUCache(histories, limit_bytes)
        self.prompts = LRUCache(prompts, limit_bytes // 4)

    def find(self, key: str, parent_key: str | None, ids: Ids) -> tuple[CacheEntry | None, int, bool]:
        """The state that covers most of ``ids``, how many it covers, and whether it is this episode's own: the history under
        ``key``, or that of the segment which it leaves."""
        own = self.histories.pop(key) if parent_key is None else self.histories.get(parent_key)
        if own is not None and own.count_covered(ids) == own.state.stop:
            return own, own.state.stop, True
        if (same := self.prompts.get(ids.tobytes())) is not None:
            return same, same.count_covered(ids), False
        candidates = [*self.prompts.values(), *([own] if own is not None else [])]
        best = max(candidates, key=lambda entry: entry.count_covered(ids), default=None)
        covered = best.count_covered(ids) if best is not None else 0
        return (best, covered, best is own) if covered > 0 else (None, 0, False)

    def forget(self, cache_key: str) -> None:
        """Drop all histories of an episode."""
        self.histories.remove_all(cache_key, f"{cache_key}/")

    def clear(self) -> None:
        self.histories.clear()
        self.prompts.clear()
