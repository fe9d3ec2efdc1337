"""The engine: one thread that samples for all active rows, one token per step, while requests join and leave between tokens.

The sampler above hands it errands and hears the bell when some are settled; the runner below computes a step. Only this
thread touches rows, cache and weights. A step is: take in errands, swap if asked, drop the abandoned, admit who waits, run the
model once for every row, choose tokens, settle who is finished.
"""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from fleetbus_workers.inference.torch.batch import Batch, Extra, Runner
from fleetbus_workers.inference.torch.choosing import choose
from fleetbus_workers.inference.torch.kept import Kept, KeptStates, common_length
from fleetbus_workers.inference.torch.slots import State
from fleetbus_workers.inference.torch.turn import Errand, Swap, Turn

EXTRA_TOKENS_LIMIT = 2048
"""Extra tokens of one step, beyond which no further row joins: bounds how long the others wait for their next token."""

WORTH_WAITING = 16
"""A row joins one step later if another that joins now computes at least this many of its tokens."""


class Engine:
    """Runs in one thread from `run` to `stop`; every other method belongs to that thread unless it says otherwise."""

    def __init__(
        self, runner: Runner, kept: KeptStates, stats: dict[str, float], *, version: int, threads: int, ring: Callable[[], None]
    ) -> None:
        self.version = version
        self.settled: deque[Errand] = deque()  # holds at most what was handed in, which the sampler bounds
        self._runner, self._kept, self._stats, self._threads = runner, kept, stats, threads
        self._ring = ring
        self._slots = runner.cache.slots
        self._intake: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._stopping = False
        self._waiting: deque[Turn] = deque()
        self._rows: list[Turn] = []
        self._reference: Turn | None = None
        self._reference_state: State | None = None
        self._holds = [0] * self._slots
        self._tokens = np.zeros(self._slots, dtype=np.int64)
        self._positions = np.zeros(self._slots, dtype=np.int64)

    def hand_in(self, errand: Errand) -> None:
        """From the event loop: never blocks."""
        self._intake.put(errand)

    def stop(self) -> None:
        """From the event loop: `run` returns after the step in progress."""
        self._stopping = True
        self._intake.put(None)

    def run(self) -> None:
        """Work until `stop`; whatever ends it, all errands are settled."""
        reason = "the engine was stopped"
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while not self._stopping:
                    self._work()
        except BaseException as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
            raise
        finally:
            self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """Settle everything that was handed in; also for the event loop, once the thread has ended."""
        while not self._intake.empty():
            if (errand := self._intake.get()) is not None:
                self._fail(errand, reason)
        for turn in [*self._rows, *self._waiting]:
            self._fail(turn, reason)
        self._rows.clear()
        self._waiting.clear()
        self._ring()

    def _work(self) -> None:
        self._take_in()
        began = perf_counter()
        self._drop_abandoned()
        extras, founders = self._admit()
        if self._rows:
            self._step(extras, founders)
            self._stats["busy_seconds"] += perf_counter() - began
        if self.settled:
            self._ring()

    def _take_in(self) -> None:
        """Errands that arrived; with nothing to do, wait for one."""
        if not self._rows and not self._waiting:
            self._accept(self._intake.get())
        while not self._intake.empty():
            self._accept(self._intake.get())

    def _accept(self, errand: Errand | None) -> None:
        if isinstance(errand, Turn):
            self._waiting.append(errand)
        elif isinstance(errand, Swap):
            self._swap(errand)

    def _swap(self, swap: Swap) -> None:
        """New tokens come from the new version; what rows have computed so far stays with them, and is kept for nobody."""
        try:
            self._runner.adopt(swap.prepared)
        except BaseException:
            self._fail(swap, "the engine failed while it took over the weights")
            raise
        self.version = swap.version
        self._kept.clear()
        self._reference = self._reference_state = None
        self._holds = [0] * self._slots
        for turn in self._rows:
            turn.shared = 0
            turn.sample_from(swap.version)
        self.settled.append(swap)

    def _drop_abandoned(self) -> None:
        for turn in [turn for turn in self._waiting if turn.abandoned]:
            self._waiting.remove(turn)
        for row in reversed(range(len(self._rows))):
            if self._rows[row].abandoned:
                self._free(row)

    def _admit(self) -> tuple[list[Extra], list[Turn]]:
        """Give free rows to those who wait, in order of arrival, but see `WORTH_WAITING`.

        Returns what the rows that joined bring along, and those of them that compute much that others may need.
        """
        extras: list[Extra] = []
        founders: list[Turn] = []
        tokens = 0
        for turn in list(self._waiting) if len(self._rows) < self._slots else []:
            if len(self._rows) == self._slots or tokens > EXTRA_TOKENS_LIMIT:
                break
            kept, covered, own = self._kept.find(turn.request.cache_key, turn.ids)
            if not own and self._is_computed_now(turn, covered, founders):
                continue
            self._waiting.remove(turn)
            extra = self._join(turn, kept, covered)
            if extra is not None:
                extras.append(extra)
                tokens += len(extra.ids)
            if not own and len(turn.ids) - covered > WORTH_WAITING:
                founders.append(turn)
        return extras, founders

    def _is_computed_now(self, turn: Turn, covered: int, founders: list[Turn]) -> bool:
        """Whether another row computes, in this very step, a good part of what this turn lacks, and it will be kept."""
        if self._kept.prompts.limit == 0 or len(turn.ids) - covered < WORTH_WAITING:
            return False
        return any(common_length(turn.ids, other.ids) - covered >= WORTH_WAITING for other in founders)

    def _join(self, turn: Turn, kept: Kept | None, covered: int) -> Extra | None:
        row, length = len(self._rows), len(turn.ids)
        self._rows.append(turn)
        self._runner.cache.reserve(length + 1)
        turn.joined_under = self.version
        turn.sample_from(self.version)
        if self._reference is None:
            self._reference = turn
        turn.shared = common_length(turn.ids, self._reference.ids)
        self._restore(row, turn, kept, covered)
        self._tokens[row], self._positions[row] = turn.ids[-1], length - 1
        self._stats["cached_tokens"] += covered
        self._stats["prefill_tokens"] += length - covered
        return Extra(row, covered, turn.ids[covered:-1], turn.images) if covered < length - 1 else None

    def _restore(self, row: int, turn: Turn, kept: Kept | None, covered: int) -> None:
        """Copy the first ``covered`` tokens into a slot, except for what it already holds of the reference prompt."""
        held = min(self._holds[row], turn.shared)
        if kept is not None:
            if self._reference_state is not None:
                self._runner.cache.restore(row, self._reference_state, held, min(covered, kept.state.start))
            self._runner.cache.restore(row, kept.state, held, covered)
        self._holds[row] = turn.shared

    def _step(self, extras: list[Extra], founders: list[Turn]) -> None:
        count = len(self._rows)
        tokens, positions = self._tokens[:count], self._positions[:count]
        longest = int(positions.max()) + 1
        self._runner.cache.reserve(longest)
        shared = min(turn.shared for turn in self._rows) if count > 1 else 0
        batch = Batch(tokens, positions, longest, min(shared, longest - 1), tuple(extras))
        logits = self._runner.step(batch)
        uniforms = np.fromiter((turn.uniform() for turn in self._rows), np.float32, count)
        sampled, logprobs = choose(
            logits, uniforms, [turn.temperature for turn in self._rows], [turn.top_p for turn in self._rows]
        )
        self._keep_prompts(founders)
        self._positions[:count] += 1
        self._tokens[:count] = sampled
        self._stats["sampled_tokens"] += count
        for row in reversed(range(count)):
            self._append(row, sampled[row], logprobs[row])

    def _append(self, row: int, token: int, logprob: float) -> None:
        turn = self._rows[row]
        turn.sampled.append(token)
        turn.logprobs.append(logprob)
        if token in turn.stop_ids or len(turn.sampled) >= turn.limit or not math.isfinite(logprob):
            self._settle(row)

    def _settle(self, row: int) -> None:
        turn = self._rows[row]
        if not math.isfinite(turn.logprobs[-1]):
            self._fail(turn, f"version {self.version} gives a log-probability of {turn.logprobs[-1]}")
            self._runner.cache.wipe(row)
            self._holds[row] = 0
        else:
            turn.finish("stop" if turn.sampled[-1] in turn.stop_ids else "length")
            self.settled.append(turn)
            self._keep_history(row)
        self._free(row)

    def _fail(self, errand: Errand, reason: str) -> None:
        errand.failure = reason
        self.settled.append(errand)

    def _free(self, row: int) -> None:
        """The last row moves into the gap, so that active rows stay contiguous."""
        last = len(self._rows) - 1
        if row != last:
            held = min(self._holds[last], self._holds[row])
            self._runner.cache.move(last, row, held, int(self._positions[last]))
            self._holds[row] = self._holds[last]
            self._rows[row] = self._rows[last]
            self._tokens[row], self._positions[row] = self._tokens[last], self._positions[last]
        self._rows.pop()

    def _keep_history(self, row: int) -> None:
        """All but the last sampled token have keys and values."""
        turn, length = self._rows[row], int(self._positions[row])
        if turn.joined_under == self.version and not turn.abandoned:
            ids = np.concatenate((turn.ids, np.array(turn.sampled[:-1], dtype=np.int64)))
            state = self._runner.cache.save(row, turn.shared, length)
            self._kept.histories.put(turn.request.cache_key, Kept(ids, state))

    def _keep_prompts(self, founders: list[Turn]) -> None:
        if self._reference is not None and self._reference_state is None:
            row = self._rows.index(self._reference)
            self._reference_state = self._runner.cache.save(row, 0, len(self._reference.ids))
        for turn in founders:
            state = self._runner.cache.save(self._rows.index(turn), turn.shared, len(turn.ids))
            self._kept.prompts.put(turn.ids.tobytes(), Kept(turn.ids, state))
