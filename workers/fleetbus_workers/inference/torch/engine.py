"""The engine: one thread that samples for all active rows, one token per step, while requests join and leave between tokens.

The sampler submits operations and is notified when some are completed; the runner computes a step. Only this thread touches
rows, cache and weights. A step is: receive operations, swap weights if asked, drop cancelled turns, admit waiting turns, run
the model once for all rows, sample tokens, complete finished turns. Turns that have been told and have said the same so
far are one row, until they draw different tokens (docs/decisions/0261-answers-that-begin-alike-are-run-once.md).
"""

import math
import queue
from collections import deque
from collections.abc import Callable
from itertools import chain
from time import perf_counter

import numpy as np
import torch

from fleetbus_workers.inference.torch.batch import Batch, PrefillTokens, Runner
from fleetbus_workers.inference.torch.kv_cache import CacheEntry, PrefixCache
from fleetbus_workers.inference.torch.sampling import sample_tokens
from fleetbus_workers.inference.torch.slots import State
from fleetbus_workers.inference.torch.turn import EngineOperation, Turn, WeightSwap
from fleetbus_workers.token_prefix import common_prefix_length

PREFILL_TOKENS_LIMIT = 2048
"""Extra tokens of one step, beyond which no further row joins: bounds how long the others wait for their next token."""

MIN_SHARED_PREFILL = 8
"""A row joins one step later if another that joins now computes at least this many of its tokens."""


class Engine:
    """Runs in one thread from `run` to `stop`; every other method belongs to that thread unless it says otherwise."""

    def __init__(
        self,
        runner: Runner,
        prefix_cache: PrefixCache,
        stats: dict[str, float],
        *,
        version: int,
        threads: int,
        notify: Callable[[], None],
    ) -> None:
        self.version = version
        self.completed: deque[EngineOperation] = deque()  # holds at most what was handed in, which the sampler bounds
        self._runner, self._prefix_cache, self._stats, self._threads = runner, prefix_cache, stats, threads
        self._notify = notify
        self._slots = runner.cache.slots
        self._intake: queue.SimpleQueue[EngineOperation | None] = queue.SimpleQueue()
        self._stopping = False
        self._waiting: deque[Turn] = deque()
        self._rows: list[list[Turn]] = []  # of each slot, the turns whose history it holds
        self._active = 0
        self._reference: Turn | None = None
        self._reference_state: State | None = None
        self._reference_lengths = [0] * self._slots
        self._tokens = np.zeros(self._slots, dtype=np.int64)
        self._positions = np.zeros(self._slots, dtype=np.int64)

    def count_requests(self) -> tuple[int, int]:
        """Turns that are sampled and turns that wait; from any thread."""
        return self._active, len(self._waiting) + self._intake.qsize()

    def submit(self, operation: EngineOperation) -> None:
        """From the event loop: never blocks."""
        self._intake.put(operation)

    def stop(self) -> None:
        """From the event loop: `run` returns after the step in progress."""
        self._stopping = True
        self._intake.put(None)

    def run(self) -> None:
        """Work until `stop`; in every case all operations are completed."""
        reason = "the engine was stopped"
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while not self._stopping:
                    self._run_once()
        except BaseException as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """Settle everything that was handed in; also for the event loop, once the thread has ended."""
        while not self._intake.empty():
            if (operation := self._intake.get()) is not None:
                self._fail(operation, reason)
        for turn in [*chain.from_iterable(self._rows), *self._waiting]:
            self._fail(turn, reason)
        self._rows.clear()
        self._active = 0
        self._waiting.clear()
        self._notify()

    def _run_once(self) -> None:
        self._receive_operations()
        started = perf_counter()
        self._drop_abandoned()
        prefills, prefix_owners = self._admit()
        if self._rows:
            self._step(prefills, prefix_owners)
            self._stats["busy_seconds"] += perf_counter() - started
        if self.completed:
            self._notify()

    def _receive_operations(self) -> None:
        """Operations that arrived; when idle, wait for one."""
        if not self._rows and not self._waiting:
            self._accept(self._intake.get())
        while not self._intake.empty():
            self._accept(self._intake.get())

    def _accept(self, operation: EngineOperation | None) -> None:
        if isinstance(operation, Turn):
            self._waiting.append(operation)
        elif isinstance(operation, WeightSwap):
            self._swap(operation)

    def _swap(self, swap: WeightSwap) -> None:
        """New tokens come from the new version; what rows have computed so far stays with them and is not cached."""
        try:
            self._runner.adopt(swap.prepared)
        except BaseException:
            self._fail(swap, "the engine failed while it took over the weights")
            raise
        self.version = swap.version
        self._prefix_cache.clear()
        self._reference = self._reference_state = None
        self._reference_lengths = [0] * self._slots
        for turn in chain.from_iterable(self._rows):
            turn.shared = 0
            turn.record_version(swap.version)
        self.completed.append(swap)

    def _drop_abandoned(self) -> None:
        for turn in [turn for turn in self._waiting if turn.abandoned]:
            self._waiting.remove(turn)
        for row in reversed(range(len(self._rows))):
            self._keep(row, [turn for turn in self._rows[row] if not turn.abandoned])

    def _admit(self) -> tuple[list[PrefillTokens], list[Turn]]:
        """Give free rows to waiting turns in order of arrival, but see `MIN_SHARED_PREFILL`; one row to those with equal ids.

        Returns what the rows that joined bring along, and those of them that compute much that others may need.
        """
        prefills: list[PrefillTokens] = []
        prefix_owners: list[Turn] = []
        joined: dict[bytes, list[Turn]] = {}
        tokens = 0
        for turn in list(self._waiting) if self._active < self._slots else []:
            if self._active == self._slots or tokens > PREFILL_TOKENS_LIMIT:
                break
            if not turn.images and (row := joined.get(turn.ids.tobytes())) is not None:
                self._waiting.remove(turn)
                self._join_row(row, turn)
                continue
            entry, covered, own = self._prefix_cache.find(turn.request.history_key, turn.request.parent_key, turn.ids)
            if not own and self._is_being_computed(turn, covered, prefix_owners):
                continue
            self._waiting.remove(turn)
            prefill = self._start_row(turn, entry, covered)
            if not turn.images:
                joined[turn.ids.tobytes()] = self._rows[-1]
            if prefill is not None:
                prefills.append(prefill)
                tokens += len(prefill.ids)
            if not own and len(turn.ids) - covered > MIN_SHARED_PREFILL:
                prefix_owners.append(turn)
        return prefills, prefix_owners

    def _is_being_computed(self, turn: Turn, covered: int, prefix_owners: list[Turn]) -> bool:
        """True if another row computes, in this very step, a good part of what this turn lacks, and it will be kept."""
        if self._prefix_cache.prompts.limit == 0 or len(turn.ids) - covered < MIN_SHARED_PREFILL:
            return False
        return any(common_prefix_length(turn.ids, other.ids) - covered >= MIN_SHARED_PREFILL for other in prefix_owners)

    def _start_row(self, turn: Turn, entry: CacheEntry | None, covered: int) -> PrefillTokens | None:
        row, length = len(self._rows), len(turn.ids)
        self._rows.append([turn])
        self._active += 1
        self._runner.cache.reserve(length + 1)
        turn.start(self.version)
        if self._reference is None:
            self._reference = turn
        turn.shared = common_prefix_length(turn.ids, self._reference.ids)
        self._restore(row, turn, entry, covered)
        self._tokens[row], self._positions[row] = turn.ids[-1], length - 1
        self._stats["cached_tokens"] += covered
        self._stats["prefill_tokens"] += length - covered
        return PrefillTokens(row, covered, turn.ids[covered:-1], turn.images) if covered < length - 1 else None

    def _join_row(self, row: list[Turn], turn: Turn) -> None:
        """A turn with the ids of those that join in this step: it costs nothing until it draws another token than they do."""
        turn.start(self.version)
        turn.shared = row[0].shared
        row.append(turn)
        self._active += 1
        self._stats["cached_tokens"] += len(turn.ids)

    def _restore(self, row: int, turn: Turn, entry: CacheEntry | None, covered: int) -> None:
        """Copy the first ``covered`` tokens into a slot, except for what it already holds of the reference prompt."""
        held = min(self._reference_lengths[row], turn.shared)
        if entry is not None:
            if self._reference_state is not None:
                self._runner.cache.restore(row, self._reference_state, held, min(covered, entry.state.start))
            self._runner.cache.restore(row, entry.state, held, covered)
        self._reference_lengths[row] = turn.shared

    def _step(self, prefills: list[PrefillTokens], prefix_owners: list[Turn]) -> None:
        count = len(self._rows)
        tokens, positions = self._tokens[:count], self._positions[:count]
        longest = int(positions.max()) + 1
        self._runner.cache.reserve(longest)
        shared = min(turns[0].shared for turns in self._rows) if count > 1 else 0
        batch = Batch(tokens, positions, longest, min(shared, longest - 1), tuple(prefills))
        logits = self._runner.step(batch)
        turns = list(chain.from_iterable(self._rows))
        rows = np.repeat(np.arange(count), [len(row) for row in self._rows])
        uniforms = np.fromiter((turn.draw_uniform() for turn in turns), np.float32, len(turns))
        sampled, logprobs = sample_tokens(logits, uniforms, [turn.request.sampling for turn in turns], rows)
        for turn, token, logprob in zip(turns, sampled, logprobs, strict=True):
            turn.sampled.append(token)
            turn.logprobs.append(logprob)
        self._cache_prompts(prefix_owners)
        self._positions[:count] += 1
        self._stats["sampled_tokens"] += len(turns)
        self._stats["computed_tokens"] += count
        for row in reversed(range(count)):
            self._advance(row)

    def _advance(self, row: int) -> None:
        """Complete the turns of a row that have ended; those of the others that drew the same token are a row from here on."""
        branches: dict[int, list[Turn]] = {}
        finite = True
        for turn in self._rows[row]:
            if not math.isfinite(turn.logprobs[-1]):
                finite = False
                self._fail(turn, f"version {self.version} gives a log-probability of {turn.logprobs[-1]}")
            elif turn.sampled[-1] in turn.stop_ids or len(turn.sampled) >= turn.limit:
                turn.finish("stop" if turn.sampled[-1] in turn.stop_ids else "length")
                self.completed.append(turn)
                self._cache_history(row, turn)
            else:
                branches.setdefault(turn.sampled[-1], []).append(turn)
        if not finite and not branches:
            self._runner.cache.wipe(row)
            self._reference_lengths[row] = 0
        first, *others = branches.values() or [[]]
        self._keep(row, first)
        for turns in others:
            self._branch(row, turns)

    def _fail(self, operation: EngineOperation, reason: str) -> None:
        operation.failure = reason
        self.completed.append(operation)

    def _branch(self, row: int, turns: list[Turn]) -> None:
        """A row of their own for turns of ``row`` that have drawn another token than those that stay in it."""
        branch, length = len(self._rows), int(self._positions[row])
        held = min(self._reference_lengths[branch], self._reference_lengths[row])
        self._runner.cache.move(row, branch, held, length)
        self._reference_lengths[branch] = self._reference_lengths[row]
        self._rows.append(turns)
        self._active += len(turns)
        self._tokens[branch], self._positions[branch] = turns[0].sampled[-1], length

    def _keep(self, row: int, turns: list[Turn]) -> None:
        """Leave ``turns`` alone in a row; without any, free it."""
        self._active -= len(self._rows[row]) - len(turns)
        self._rows[row] = turns
        if not turns:
            self._release_row(row)
        elif turns[0].sampled:
            self._tokens[row] = turns[0].sampled[-1]

    def _release_row(self, row: int) -> None:
        """The last row moves into the gap, so that active rows stay contiguous."""
        last = len(self._rows) - 1
        if row != last:
            held = min(self._reference_lengths[last], self._reference_lengths[row])
            self._runner.cache.move(last, row, held, int(self._positions[last]))
            self._reference_lengths[row] = self._reference_lengths[last]
            self._rows[row] = self._rows[last]
            self._tokens[row], self._positions[row] = self._tokens[last], self._positions[last]
        self._rows.pop()

    def _cache_history(self, row: int, turn: Turn) -> None:
        """All but the last sampled token have keys and values."""
        length = int(self._positions[row])
        if turn.start_version == self.version and not turn.abandoned:
            ids = np.concatenate((turn.ids, np.array(turn.sampled[:-1], dtype=np.int64)))
            state = self._runner.cache.save(row, turn.shared, length)
            self._prefix_cache.histories.put(turn.request.history_key, CacheEntry(ids, state))

    def _cache_prompts(self, prefix_owners: list[Turn]) -> None:
        if self._reference is not None and self._reference_state is None:
            row = self._find_row(self._reference)
            self._reference_state = self._runner.cache.save(row, 0, len(self._reference.ids))
        for turn in prefix_owners:
            state = self._runner.cache.save(self._find_row(turn), turn.shared, len(turn.ids))
            self._prefix_cache.prompts.put(turn.ids.tobytes(), CacheEntry(turn.ids, state))

    def _find_row(self, turn: Turn) -> int:
        return next(row for row, turns in enumerate(self._rows) if turns[0] is turn)
