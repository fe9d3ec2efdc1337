"""Sessions under stress of a policy that talks nonsense to real tools: the warehouse over MCP, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from fleetbus.config.settings import InferenceSettings
from fleetbus_schemas import ChatMessage, EpisodeFinished, ToolSpec, VersionSpan
from fleetbus_workers.environment.adapters.warehouse.tasks import build_warehouse_task
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.tool_calls import ConstantGrader
from tests.support.virtual_time import virtual_time

FIRST_BYTE = 2
"""Ids below are the template's own."""

anyio_backend = virtual_time


class Speaker(ScriptedSampler):
    """A policy that says these bytes, one line per turn, and then that it is done."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        super().__init__()
        self._lines = [*lines, b"<done>"]
        self._said = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.lowlevel.checkpoint()
        ids = [FIRST_BYTE + byte for byte in self._lines[self._said]]
        self._said += 1
        return Generation(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            finish_reason="stop",
            versions=(VersionSpan(version=0, start=0, stop=len(ids)),),
        )


class CannedTemplate(ScriptedTemplate):
    """Ids as text; what is no UTF-8 becomes replacement characters, as with real tokenizers. The prompt costs one token."""

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        return [0]

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        return [0]

    def decode_text(self, ids: Sequence[int]) -> str:
        return bytes(one - FIRST_BYTE for one in ids).decode("utf-8", "replace")


async def answers_to(*lines: bytes) -> tuple[EpisodeFinished, list[str]]:
    """The result of an episode in which the policy says these lines, and what it was answered."""
    factory = build_environment_factory("warehouse", verifier=ConstantGrader())
    with anyio.fail_after(300):
        async with (
            factory.run(),
            small_deployment(build_configuration(inference=InferenceSettings(max_model_len=8192))) as fleet,
        ):
            fleet.environment("environment-0", make=factory)
            fleet.inference("inference-0", sampler=Speaker(lines), template=CannedTemplate())
            await fleet.request(task=build_warehouse_task(7), max_turns=10)
            result = await fleet.result()
            await fleet.check_at_rest()
            observations = await fleet.observations()
    return result, [str(observation.messages[-1].content) for observation in observations[1:]]


def call(name: str, arguments: str) -> bytes:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.encode()


async def test_an_unknown_tool_is_told_to_the_policy_and_counted() -> None:
    result, answers = await answers_to(call("open_sesame", "{}"))
    assert "open_sesame" in answers[0]
    assert (result.outcome, result.reward, result.tool_calls, result.tool_errors) == ("completed", 1.0, 1, 1)


async def test_wrong_arguments_are_told_to_the_policy_and_counted() -> None:
    result, answers = await answers_to(call("get_field", '{"id": "seven", "field": 1}'), call("get_field", "{}"))
    assert all("error" in answer.lower() for answer in answers)
    assert (result.outcome, result.tool_calls, result.tool_errors) == ("completed", 2, 2)


@pytest.mark.parametrize(
    "line",
    [
        b"<tool_call>{this is no json</tool_call>",
        b'<tool_call>{"name": 12, "arguments": []}</tool_call>',
        b"<tool_call>",
        b"</tool_call><tool_call></tool_call>" * 100,
        b'<tool_call>{"name": "find_item", "arguments": ' + b"[" * 200,
        bytes(range(254)),
        b"\xff" * 300,
        b" ",
    ],
    ids=["no json", "wrong types", "unclosed", "many", "deep", "every byte", "no text", "blank"],
)
async def test_garbage_from_the_model_is_answered_and_the_episode_goes_on(line: bytes) -> None:
    result, answers = await answers_to(line, call("find_item", '{"name": "nothing like it"}'))
    assert len(answers) == 2
    assert (result.outcome, result.reward, result.turns) == ("completed", 1.0, 3)
    assert result.error == ""
