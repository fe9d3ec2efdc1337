"""Grades recorded episodes by another verifier: their final answers and conversations, as the environment handed them over.

Above it is `fleetbus regrade`; below it the isolation that all verifier code runs in. There is no environment any more: a
verifier that asks it has no verdict. So many at a time are graded as the verifier has places, and as many wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio

from fleetbus.core.algorithms.reward_components import VERIFIER
from fleetbus.core.text.tool_calls import final_answer, is_done
from fleetbus.recording.episodes import Transcript
from fleetbus_schemas import GRADED, EpisodeFinished
from fleetbus_workers.environment.adapters.common.tool_results import is_final_answer, read_final_answer
from fleetbus_workers.environment.isolation.verifier import Verifier
from fleetbus_workers.environment.isolation.verifier.base import to_plain_text
from fleetbus_workers.replay.new_verifier import NewVerifier

Verdicts = list[tuple[EpisodeFinished, float | None, str]]


class NoEnvironment:
    """The tools of an episode that is over."""

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        raise _refuse()

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise _refuse()


def _refuse() -> LookupError:
    return LookupError("a recorded episode has no environment: only its final answer and conversation can be graded again")


class Regrader:
    """Grades transcripts inside `Verifier.run`. ``places`` at a time."""

    def __init__(self, verifier: Verifier, code: NewVerifier, *, places: int) -> None:
        self._verifier = verifier
        self._code = code
        self._places = places
        self.verdicts: Verdicts = []
        """Results with their new rewards, and why there is none."""
        self.skipped = 0

    async def run(self, transcripts: AsyncIterator[Transcript]) -> None:
        """Grade all of them; those without a grade that a verifier could give are skipped."""
        room = anyio.Semaphore(2 * self._places)
        async with anyio.create_task_group() as tasks:
            async for transcript in transcripts:
                code = self._find_code(transcript)
                if code is None or transcript.result is None:
                    self.skipped += 1
                    continue
                await room.acquire()
                tasks.start_soon(self._grade, transcript, transcript.result, code, room)

    def _find_code(self, transcript: Transcript) -> str | None:
        result = transcript.result
        if result is None or result.outcome not in (*GRADED, "verifier_unknown") or not transcript.turns:
            return None
        return self._code.find_code(transcript.request.task if transcript.request else None, result.task_key)

    async def _grade(self, transcript: Transcript, result: EpisodeFinished, code: str, room: anyio.Semaphore) -> None:
        try:
            verdict = await self._verifier.verify(
                code,
                final_answer=find_final_answer(transcript),
                conversation=build_conversation(transcript),
                tools=NoEnvironment(),
            )
            self.verdicts.append((result, verdict.reward, verdict.reason))
        finally:
            room.release()


def find_old_reward(result: EpisodeFinished) -> float | None:
    """The reward that the verifier gave then, before anything was added to it."""
    return result.reward_components.get(VERIFIER, result.reward)


def find_final_answer(transcript: Transcript) -> str | None:
    """The answer that the last turn gave; None if it gave none."""
    action = next((turn.action for turn in reversed(transcript.turns) if turn.action is not None), None)
    if action is None:
        return None
    if is_done(action.text):
        return final_answer(action.text)
    ended = transcript.result is not None and transcript.result.outcome != "truncated"
    return read_final_answer(action) if ended and is_final_answer(action) else None


def build_conversation(transcript: Transcript) -> list[dict[str, Any]]:
    """Messages as verifiers get them: what the policy was shown, what it said, and the last observation."""
    found: list[dict[str, Any]] = []
    for turn in transcript.turns:
        found += [{"role": each.role, "content": to_plain_text(each.content)} for each in turn.messages]
        if turn.action is not None:
            found.append({"role": "assistant", "content": turn.action.text})
    last = transcript.result.last_observation if transcript.result is not None else ""
    return [*found, {"role": "user", "content": last}] if last else found
