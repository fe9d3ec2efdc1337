"""A result that no message can carry ends its episode with a recorded reason; the worker and its other episodes live on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from fleetbus_schemas import Action, ChatMessage
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step, Verdict
from fleetbus_workers.environment.failure_location import ERROR_CHARS, TRACEBACK_CHARS, clean_error, clean_traceback
from fleetbus_workers.environment.normalization import TOO_DEEP, clip_values, to_plain_values
from tests.support.small_deployment import small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time

MIB = 1 << 20


def nest(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Mute(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class Returning(ScriptedEnvironment):
    """One step, and its verdict."""

    def __init__(self, step: Step | Exception, verdict: Verdict) -> None:
        super().__init__(turns=1)
        self._step, self._verdict = step, verdict

    async def step(self, action: Action) -> Step:
        if isinstance(self._step, Exception):
            raise self._step
        return self._step

    async def verify(self) -> Verdict:
        return self._verdict


OVER = Step(terminated=True)
GOOD = Verdict(reward=1.0)


@pytest.mark.parametrize(
    ("step", "verdict", "outcome", "error_class"),
    [
        (Step(terminated=True, info={"deep": nest(900)}), GOOD, "completed", ""),
        (Step(terminated=True, info={"mute": Mute(), Mute(): 1}), GOOD, "completed", ""),  # type: ignore[dict-item]
        (Step(terminated=True, tool_calls=1 << 70), GOOD, "env_failed", "InvalidReturn"),
        (Step(terminated=True, tool_errors=-1), GOOD, "env_failed", "InvalidReturn"),
        (OVER, Verdict(reward=1.0, components={"\ud800": 1.0}), "verifier_unknown", "no_verdict"),
        (OVER, Verdict(reward=1.0, transcript="x" * 2 * MIB), "env_failed", "result_unstorable"),
        (Mute(), GOOD, "env_failed", "Mute"),
        (Step(messages=(ChatMessage(role="user", content="\ud800"),)), GOOD, "env_failed", "MalformedMessage"),
        (ValueError("x" * 30 * MIB), GOOD, "env_failed", "ValueError"),
    ],
)
async def test_an_episode_ends_with_a_reason_and_its_worker_goes_on(
    step: Step | Exception, verdict: Verdict, outcome: str, error_class: str
) -> None:
    broken: Callable[[], Any] = lambda: Returning(step, verdict)  # noqa: E731
    makers = [broken, ScriptedEnvironment]
    with anyio.fail_after(300):
        async with small_deployment() as fleet:
            member = fleet.environment("environment-0", make=lambda: makers.pop(0)())
            fleet.inference("inference-0")
            await fleet.request("e")
            await fleet.until(lambda: bool(fleet.results["e"]) or member.ended.is_set())
            assert member.error is None
            result = await fleet.result("e")
            await fleet.request("next")
            assert (await fleet.result("next")).outcome == "completed"
    assert (result.outcome, result.error_class) == (outcome, error_class)
    assert (result.reward is None) == (outcome != "completed")


def test_deep_data_keeps_what_a_reader_can_decode() -> None:
    kept: Any = to_plain_values({"a": nest(900), "b": 1})
    assert kept["b"] == 1
    while isinstance(kept := kept["a"] if isinstance(kept, dict) else kept[0], list):
        pass
    assert kept == TOO_DEEP
    assert clip_values({"a": 1 << 80, "b": "\ud800", "c": Mute(), "d": 2}, 100) == {"d": 2}


def test_a_traceback_that_quotes_megabytes_is_read_at_its_ends_alone() -> None:
    text = clean_traceback("password=hunter2 " + "x = 'y' " * 4 * MIB + " password=hunter3")
    assert len(text) <= TRACEBACK_CHARS + 100
    assert "hunter" not in text


@pytest.mark.parametrize("clean", [clean_error, clean_traceback])
@pytest.mark.parametrize("length", [4 * ERROR_CHARS, 1 << 14, 1 << 16, 1 << 18])
def test_no_part_of_a_secret_is_left_where_a_long_text_is_cut(clean: Callable[[str], str], length: int) -> None:
    """Texts became short where secrets were taken out of them: then their edge was shown."""
    key = f"sk-{'A1b2' * 10}"
    for shift in range(5, len(key), 5):
        before = f"-----BEGIN PRIVATE KEY-----{'x' * (length // 2)}-----END PRIVATE KEY----- api_key="
        before += f"{'y' * (length - shift - len(before) - 1)} "
        shown = clean(f"{before}{key} api_key={'z' * MIB} {key} api_key={'z' * (length - shift - 10)} ")
        assert "A1b2" not in shown and "[redacted]" in shown and len(shown) <= TRACEBACK_CHARS + 100


def test_an_error_of_megabytes_is_cleaned_at_once() -> None:
    started = time.process_time()
    assert len(clean_error("word " * MIB)) == ERROR_CHARS
    assert time.process_time() - started < 2.0
