"""Tools that the model's own chat template describes: what the policy reads, what its calls do, and how they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import EnvironmentSettings, InferenceSettings
from fleetbus_schemas import Action, ChatMessage, SamplingSettings, Task, ToolCall, ToolSpec, VersionSpan
from fleetbus_schemas.tokens import unpack_ids
from fleetbus_workers.environment.adapters.mcp.connection import ServerGone, ToolResult
from fleetbus_workers.environment.adapters.mcp.environment import McpEnvironment
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.base import Generation, GenerationRequest
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.inference.scripted import StubSampler
from tests.support.small_deployment import build_configuration, small_deployment
from tests.support.template_folders import write_template_folder
from tests.support.tool_calls import ConstantGrader

TEMPLATES = Path(__file__).parents[1] / "unit" / "chat_templates"
FIND = "<tool_call>\n<function=find_item>\n<parameter=name>\n{}\n</parameter>\n</function>\n</tool_call>"
ROOMY = InferenceSettings(slots=16, max_model_len=8192)
SAMPLING = SamplingSettings(max_tokens=4096)


class SaysInOrder(StubSampler):
    """Samples given texts, one per turn of the episode, each ended as the template ends a turn."""

    def __init__(self, template: ChatTemplate, *texts: str) -> None:
        self.template = template
        self.texts = texts

    async def generate(self, request: GenerationRequest) -> Generation:
        await anyio.lowlevel.checkpoint()
        turn = self.template.decode(request.ids).count("<|im_start|>assistant") - 1
        ids = [*self.template.encode(self.texts[turn]), self.template.turn_end]
        versions = (VersionSpan(version=self.version, start=0, stop=len(ids)),)
        return Generation(ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", versions=versions)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    text = (TEMPLATES / "qwen3-coder.jinja").read_text()
    return ChatTemplate(write_template_folder(tmp_path_factory.mktemp("model"), text))


def make_warehouse() -> Any:
    configuration = build_configuration(environment=EnvironmentSettings(slots=8, prompt="template"))
    return build_environment_factory(
        "warehouse",
        verifier=ConstantGrader(),
        prompt="template",
        configuration=configuration,  # type: ignore[arg-type]
    )


TASK = Task(key="t", prompt='Read "price" of "rope".', seed=1, verifier="def verify(env): return 1")


async def test_an_episode_reads_its_tools_in_the_rendered_prompt_and_plays_to_a_final_answer(template: ChatTemplate) -> None:
    texts = [
        f"Both.\n\n{FIND.format('rope')}\n{FIND.format('nothing')}",
        "<tool_call>\n<function>find_item</function>\n</tool_call>",
        "It costs 7.",
    ]
    async with small_deployment(build_configuration(inference=ROOMY)) as fleet:
        fleet.environment("e0", make=make_warehouse())
        fleet.inference("i0", sampler=SaysInOrder(template, *texts), template=template)
        await fleet.request(task=TASK, sampling=SAMPLING)
        result = await fleet.result()
        actions = await fleet.actions()
    assert (result.outcome, result.reward, result.turns, result.tool_calls, result.tool_errors) == ("completed", 1.0, 3, 2, 1)
    prompt, results, complaint = (template.decode(unpack_ids(action.prompt_delta)) for action in actions)
    for word in ("<name>find_item</name>", "<name>get_field</name>", "<function=example_function_name>", TASK.prompt):
        assert word in prompt
    assert results.startswith("\n<|im_start|>user\n<tool_response>\n{")
    assert results.count("<tool_response>") == 2
    assert results.index('"id"') < results.index("Error: ")
    assert complaint == (
        "\n<|im_start|>user\nError: malformed tool call: a tool call needs <function=NAME> and </function><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [(call.name, call.arguments, call.id) for call in actions[0].tool_calls] == [
        ("find_item", {"name": "rope"}, "call00000"),
        ("find_item", {"name": "nothing"}, "call00001"),
    ]
    assert [action.tool_call_errors for action in actions] == [
        (), ("a tool call needs <function=NAME> and </function>",), (),
    ]  # fmt: skip


@pytest.mark.integration
async def test_a_worker_that_takes_over_in_mid_episode_still_knows_the_tools(template: ChatTemplate) -> None:
    texts = [FIND.format("rope"), FIND.format("gear"), "Done."]
    async with small_deployment(build_configuration(inference=ROOMY)) as fleet:
        fleet.environment("e0", make=make_warehouse())
        first = SaysInOrder(template, texts[0])
        first.texts = (texts[0], "")
        worker = fleet.inference("i0", sampler=first, template=template)

        async def hang(request: GenerationRequest, answer: Any = first.generate) -> Generation:
            if request.ids[-1] != 0 and template.decode(request.ids).count("<tool_response>\n{"):
                await anyio.sleep_forever()
            found: Generation = await answer(request)
            return found

        first.generate = hang  # type: ignore[method-assign]
        await fleet.request(task=TASK, sampling=SAMPLING)
        async with fleet.bus.read([fleet.subjects.actions()]) as reader:
            await reader.receive()
        worker.kill()
        fleet.inference("i1", sampler=SaysInOrder(template, *texts), template=template)
        result = await fleet.result()
        actions = await fleet.actions()
    assert (result.outcome, result.tool_calls) == ("completed", 2)
    assert [call.id for action in actions for call in action.tool_calls] == ["call00000", "call00001"]


class SlowTools:
    """A connection with one tool, whose calls end in an order that the test chooses."""

    def __init__(self) -> None:
        self.running: dict[str, anyio.Event] = {}
        self.most = 0
        self.started = anyio.Event()

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def list_tools(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec(name="wait", description="Waits."),)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if arguments["name"] == "gone":
            raise ServerGone("the MCP server died")
        self.running[arguments["name"]] = anyio.Event()
        self.most = max(self.most, len(self.running))
        self.started.set()
        try:
            await self.running[arguments["name"]].wait()
        finally:
            del self.running[arguments["name"]]
        return ToolResult(content=f"{arguments['name']} is over")

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        raise LookupError


def calls(*names: str) -> Action:
    made = tuple(ToolCall(name="wait", arguments={"name": name}, id=f"id-{name}") for name in names)
    return Action(episode_id="e", attempt=1, turn=0, text="...", tool_calls=made)


async def play(connection: SlowTools, action: Action, *, limit: int = 2, replayable: bool = False) -> list[ChatMessage]:
    environment = McpEnvironment(
        lambda _: connection, grader=ConstantGrader(), prompt="template", parallel_calls=limit, replayable=replayable
    )
    await environment.open(TASK)
    await environment.reset()
    step = await environment.step(action)
    await environment.close()
    return list(step.messages)


async def test_calls_of_one_response_run_side_by_side_within_the_limit_and_are_answered_in_order() -> None:
    connection = SlowTools()
    messages: list[ChatMessage] = []

    async def run() -> None:
        messages.extend(await play(connection, calls("a", "b", "c")))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            for name in ("b", "c", "a"):  # the first one called ends last
                while name not in connection.running:
                    connection.started = anyio.Event()
                    await connection.started.wait()
                connection.running[name].set()
                while name in connection.running:
                    await anyio.lowlevel.checkpoint()
    assert connection.most == 2
    assert [(each.role, each.tool_call_id, each.name, each.content) for each in messages] == [
        ("tool", f"id-{name}", "wait", f"{name} is over") for name in "abc"
    ]


async def test_a_replayable_environment_executes_calls_one_after_another() -> None:
    connection = SlowTools()

    async def release() -> None:
        for name in "abc":
            while name not in connection.running:
                connection.started = anyio.Event()
                await connection.started.wait()
            connection.running[name].set()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(release)
            messages = await play(connection, calls("a", "b", "c"), limit=8, replayable=True)
    assert connection.most == 1
    assert len(messages) == 3


async def test_a_server_that_dies_in_one_of_several_calls_ends_the_others_and_the_episode() -> None:
    connection = SlowTools()
    with anyio.fail_after(5), pytest.raises(ServerGone, match="died"):
        await play(connection, calls("a", "gone"))
    assert connection.running == {}


async def test_a_response_that_was_cut_is_no_final_answer() -> None:
    cut = Action(episode_id="e", attempt=1, turn=0, text="It costs", finish_reason="length")
    (message,) = await play(SlowTools(), cut)
    assert message.role == "user"
    assert "cut at its limit" in str(message.content)
