"""Reads a run into what a static copy of its page answers: one pass for its fold, one for the chosen episodes.

Everything goes through a `Redactor` first, as into a recording. Above it is `fleetbus bundle`, below it the folds of the page.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.episodes import EpisodeRow
from fleetbus.recording.objects import find_referenced_objects
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.rows import list_transcript_subjects
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas import EpisodeFinished, Subjects
from fleetbus_workers.observe.metrics.run_view import RunView
from fleetbus_workers.observe.monitor.episode_table import group_siblings
from fleetbus_workers.observe.monitor.reward_histogram import build_reward_histogram
from fleetbus_workers.observe.monitor.shown_run import describe_curves, describe_overview, describe_row, describe_whole_episode
from fleetbus_workers.observe.monitor.success_table import build_success_table
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder
from fleetbus_workers.observe.run.run_observer import LogHealth
from fleetbus_workers.observe.run.state import RunState
from fleetbus_workers.observe.run.termination import Driver, Termination, detect_termination

MOST_GROUPS = 1_000
"""The newest; as many as the page shows at once."""

ReadEntries = Callable[[list[str]], AsyncGenerator[StreamEntry]]
ChooseRows = Callable[[Sequence[EpisodeRow]], Sequence[EpisodeRow]]
WriteEpisode = Callable[[str, dict[str, Any]], Awaitable[None]]


class RunCopier:
    """One run being copied. ``read`` gives its entries on these subjects; ``trained`` are the trainers' tokens of it, to be
    filled here; ``now_ns`` is the time of the copy; ``joined`` are the policies of seats that are trained, as far as known."""

    def __init__(
        self,
        read: ReadEntries,
        subjects: Subjects,
        redactor: Redactor,
        trained: TrainedTokensIndex,
        *,
        steps: int,
        threshold: float,
        now_ns: int,
        joined: Iterable[str] = (),
    ) -> None:
        self._read = read
        self._subjects = subjects
        self._redactor = redactor
        self._trained = trained
        self._threshold = threshold
        self._now_ns = now_ns
        self._labels: dict[str, list[StreamEntry]] = {}
        self._siblings: dict[str, dict[str, EpisodeRow]] = {}
        self.state = RunState(steps, kept_episodes=sys.maxsize, joined=joined)  # what is to be copied may be any of them
        self.health = LogHealth()
        self.objects: dict[str, None] = {}
        """The objects that the copied episodes name, in the order in which they do."""

    async def read_run(self, *, used_bytes: int, limit_bytes: int) -> None:
        """The first pass: everything but what was said. The log has this many bytes and may have so many (0: no limit)."""
        subjects, now, last = self._subjects, anyio.current_time(), 0
        wanted = [subjects.tasks(), subjects.episodes, subjects.labels]
        wanted += [subjects.train("*"), subjects.policy("*"), subjects.life("*", "*")]
        async with aclosing(self._read(wanted)) as entries:
            async for stored in entries:
                entry = self._redactor.clean(stored)
                last = stored.sequence
                kind, name = entry.subject.split(".", 3)[2], entry.subject.rpartition(".")[2]
                if kind == "train":
                    self._trained.add(entry)
                elif kind == "label":
                    self._labels.setdefault(name, []).append(entry)
                if (message := read_stored(entry)) is not None:
                    self.state.apply(entry, message, now, self._now_ns)
        self.health.record_usage(used_bytes, limit_bytes, last, now)
        self.health.followed = last

    async def copy_episodes(self, chosen: Sequence[EpisodeRow], words: TokenDecoder, write: WriteEpisode) -> None:
        """The second pass: each chosen episode given to ``write`` with its transcript, once its result was read."""
        names, self._siblings = [row.episode_id for row in chosen], group_siblings(self.state.episodes.rows)
        wanted, opened, at = set(names), dict[str, list[StreamEntry]](), {name: place for place, name in enumerate(names)}

        async def give(name: str, found: list[StreamEntry]) -> None:
            place, facts = at[name], self._describe(name, found, words)
            facts["previous"] = names[place - 1] if place else None
            facts["next"] = names[place + 1] if place + 1 < len(names) else None
            await write(name, facts)

        async with aclosing(self._read(list_transcript_subjects(self._subjects))) as entries:
            async for stored in entries:
                name = stored.subject.rpartition(".")[2]
                if name not in wanted:
                    continue
                entry = self._redactor.clean(stored)
                self.objects.update(dict.fromkeys(find_referenced_objects(entry)))
                opened.setdefault(name, []).append(entry)
                if entry.subject.split(".", 3)[2] == "episode" and isinstance(read_stored(entry), EpisodeFinished):
                    wanted.remove(name)
                    await give(name, opened.pop(name))
        for name, found in opened.items():
            await give(name, found)

    def _describe(self, name: str, entries: list[StreamEntry], words: TokenDecoder) -> dict[str, Any]:
        labelled = [*entries, *self._labels.get(name, [])]
        beside = self._siblings.get(name, {})
        return describe_whole_episode(self.state, name, labelled, words, self._trained.find(name), beside)

    def describe_run(self, chosen: Sequence[EpisodeRow], files: dict[str, str], left_out: str) -> dict[str, Any]:
        """All that is no transcript. ``files`` are the names of the chosen episodes' scripts, ``left_out`` says what is not in
        the copy."""
        state, now = self.state, anyio.current_time()
        rows = list(state.episodes.rows.values())
        made = datetime.fromtimestamp(self._now_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
        view = RunView(state, self.health, now=now, now_ns=self._now_ns, termination=self._find_ending(made, left_out))
        return {
            "overview": describe_overview(view, run=self._subjects.run, is_behind=False, has_actions=False),
            "curves": describe_curves(state),
            "rows": [describe_row(state, row) | {"found": None} for row in reversed(chosen)],
            "groups": state.groups()[::-1][:MOST_GROUPS],
            "success": dict(self._build_success(rows)),
            "rewards": build_reward_histogram(rows, state.trained_in),
            "files": files,
            "left_out": left_out,
            "copied": f"copy of {made}",
        }

    def _find_ending(self, made: str, left_out: str) -> Termination:
        """The end of the run, if it had one by then, behind the line that this is a copy."""
        copied = f"a copy of run {self._subjects.run}, made {made}: {left_out}"
        state, progress = self.state, self.state.progress
        ending = detect_termination(
            state.termination_state,
            Driver(),
            is_silent=True,
            is_anybody_alive=False,
            last_time_ns=state.last_time_ns,
            step=progress.step,
            steps=progress.steps,
            now_ns=self._now_ns,
        )
        if ending is None:
            return Termination(how="stopped", since_ns=state.last_time_ns, seconds=0.0, line=copied)
        return msgspec.structs.replace(ending, line=f"{copied}; {ending.line.partition(';')[0]}")

    def _build_success(self, rows: Sequence[EpisodeRow]) -> Iterator[tuple[str, object]]:
        for by in ("env", "task"):
            for split in ("", "train", "eval"):
                table = build_success_table(rows, {"by": by, "split": split}, threshold=self._threshold)
                yield f"{by} {split}".strip(), table
