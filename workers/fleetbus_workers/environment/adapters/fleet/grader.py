"""Verdicts from the platform: a task's verifier run there against the episode's instance.

What is not the policy's doing - the platform's failure, the verifier's, its judge's - is no verdict, and never a 0.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import anyio

from fleetbus.core.text.partial_reward import partial_reward
from fleetbus_workers.environment.adapters.fleet.api import FleetError, FleetRefused
from fleetbus_workers.environment.adapters.fleet.bundle import VerifierCode, build_execution_request, read_verifier
from fleetbus_workers.environment.adapters.fleet.connection import FleetConnection
from fleetbus_workers.environment.adapters.fleet.host import FleetHost
from fleetbus_workers.environment.base import FailedVerdict, Verdict
from fleetbus_workers.environment.isolation.verifier.base import VerifierTools

TRIES = 4
FIRST_PAUSE_SECONDS = 3.0
VERIFIER_SECONDS = 60
"""How long the platform lets the verifier run."""

MARGIN_SECONDS = 30.0
_JUDGE_ERROR = re.compile(r"^JUDGE ERROR:.*$", re.MULTILINE)


class PlatformGrader:
    """A `Grader` for the episode of ``connection``, which is set when it begins."""

    def __init__(self, host: FleetHost) -> None:
        self.connection: FleetConnection | None = None
        self._host = host

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        try:
            verifier = read_verifier(code)
        except ValueError as error:
            return Verdict(reward=None, reason=str(error))
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                await anyio.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                answer = await self._execute_verifier(verifier, final_answer, conversation)
            except FleetRefused as error:
                return Verdict(reward=None, reason=str(error))
            except FleetError as error:
                reason = str(error)
                continue
            verdict = read_verdict(
                answer,
                partial=self._host.settings.partial_reward,
                printed=self._host.settings.partial_reward_printed,
            )
            if verdict.reward is not None or not is_passing(answer):
                return verdict
            reason = verdict.reason
        return Verdict(reward=None, reason=f"no verdict in {TRIES} tries: {reason}")

    async def _execute_verifier(
        self, verifier: VerifierCode, final_answer: str | None, conversation: Sequence[dict[str, object]]
    ) -> dict[str, object]:
        api, connection = self._host.api, self.connection
        if api is None or connection is None or connection.instance is None:
            raise FleetRefused("Fleet: there is no instance to verify")
        known = await api.has_bundle(verifier.sha256)
        for with_code in (True,) if not known else (False, True):
            body = build_execution_request(
                verifier,
                key=connection.task.key,
                instance_id=connection.instance.instance_id,
                final_answer=final_answer,
                conversation=conversation,
                seconds=VERIFIER_SECONDS,
                region=self._host.settings.region,
                with_code=with_code,
            )
            try:
                return await api.execute_verifier(body, seconds=VERIFIER_SECONDS + MARGIN_SECONDS)
            except FleetRefused as error:
                if with_code or error.status not in (400, 404):
                    raise
        raise FleetRefused("Fleet: the platform lost the verifier's code")


def is_passing(answer: dict[str, object]) -> bool:
    """True if another try may end otherwise: the execution failed, or the verifier's judge did."""
    return not answer.get("success") or _JUDGE_ERROR.search(str(answer.get("stdout") or "")) is not None


def read_verdict(answer: dict[str, object], *, partial: bool, printed: bool = False) -> Verdict:
    """The verdict in the platform's answer: a number, true or false, an object with a ``score``, or nothing for a pass.

    ``partial``: a score of 0 is replaced by ``partial`` of that object, in [0, 1]. ``printed``: or by a share that was printed,
    which the policy can forge wherever a verifier prints text of the policy.
    """
    output = str(answer.get("stdout") or "").strip()
    judge = _JUDGE_ERROR.search(output)
    if judge is not None:
        return Verdict(reward=None, reason=judge[0])
    if not answer.get("success"):
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        return Verdict(reward=None, reason=f"the verifier failed: {message or 'without a reason'}")
    result = answer.get("result")
    value = 1.0 if result is None else result.get("score") if isinstance(result, dict) else result
    if not isinstance(value, int | float) or not math.isfinite(value):
        return FailedVerdict(reward=None, reason=f"the verifier returned {result!r}, no finite number"[:500])
    if value == 0:
        share = _read_returned_share(result) if partial else None
        if share is None and printed:
            share = partial_reward(output)
        value = value if share is None else share
    return Verdict(reward=float(value), reason=output)


def _read_returned_share(result: object) -> float | None:
    share = result.get("partial") if isinstance(result, dict) else None
    return float(share) if isinstance(share, int | float) and 0 <= share <= 1 else None
