"""Episodes on a Fleet-compatible platform as they should be: tools, screens, verifiers, and mistakes told in one line."""

from __future__ import annotations

import hashlib

import anyio
import msgspec
import pytest

from fleetbus.errors import UserError
from fleetbus_schemas import Image, Task, Text
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.isolation.verifier import Verifier
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.fleet_platform.episodes import TASK, begun, environments, platform, prepare, settings
from tests.support.fleet_platform.instance import SCREEN
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.tool_calls import NoGrader, call, read_step_text

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


SCREEN_TASK = Task(key="click", env="shop", prompt="Click.", modality="computer_use", verifier="def verify(env): return 1")


async def test_an_episode_from_making_an_instance_to_its_end() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        start = await begun(environment)
        (made,) = fleet.instances.values()
        expected = {"env_key": "shop", "env_version": "v1.2", "data_key": "small", "data_version": "v0.4", "ttl_seconds": 3660}
        assert expected.items() <= made.body.items()
        assert made.body["env_variables"] == {"LOGGED_IN_NAME": "Ada"}
        assert "image_type" not in made.body
        assert made.shop.resets == [{"timestamp": None, "seed": 7}]
        system = str(start.messages[0].content)
        assert "- Logged in as: Ada" in system
        assert [name for name in ("price", "order", "computer", "submit_final_answer") if f'"name": "{name}"' in system] == [
            "price",
            "order",
            "submit_final_answer",
        ]
        assert read_step_text(await environment.step(call("price", name="ink"))) == "Tool result:\n9"
        assert read_step_text(await environment.step(call("order", name="ink"))) == "Tool result:\nordered"
        last = await environment.step(call("submit_final_answer", answer="9"))
        assert (last.terminated, last.messages, last.tool_calls, last.tool_errors) == (True, (), 1, 0)
        assert (await environment.verify()).reward == 1.0
        await environment.close()
        assert made.status == "stopped"
        assert ("DELETE", "/v1/env/instances/inst1") in fleet.requests
    assert fleet.keys == {f"Bearer {KEY}"}


async def test_the_spec_and_the_variables_name_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    async with platform() as (fleet, server):
        for spec, variable in ((f"fleet:{server.url}/", "http://127.0.0.1:9/"), ("fleet", server.url)):
            monkeypatch.setenv("FLEET_BASE_URL", variable)
            factory = build_environment_factory(spec, verifier=NoGrader(), configuration=settings())
            with anyio.fail_after(50):
                async with factory.run():
                    environment = factory()
                    await environment.open(TASK)
                    await environment.close()
        assert [made.status for made in fleet.instances.values()] == ["stopped", "stopped"]


async def test_without_a_submission_the_verifier_says_zero() -> None:
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment)
        assert (await environment.verify()).reward == 0.0


async def test_tools_are_listed_once_and_one_connection_serves_the_whole_episode() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        listed = len(fleet.requests)
        for _ in range(3):
            await environment.step(call("price", name="pen"))
        assert [path for _, path in fleet.requests[listed:]] == ["/i/inst1/mcp"] * 3


async def test_an_unknown_tool_is_answered_here_and_at_once() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        before = len(fleet.requests)
        step = await environment.step(call("prise"))
        assert read_step_text(step).startswith('Error: unknown tool "prise". Available tools: price')
        assert len(fleet.requests) == before


async def test_a_verifier_is_sent_once_and_known_by_its_hash_afterwards() -> None:
    async with platform() as (fleet, server):
        for _ in range(2):
            async with environments(server) as environment:
                await begun(environment)
                assert (await environment.verify()).reward == 0.0
        assert fleet.uploads == 1


async def test_the_conversation_goes_to_verifiers_that_ask_for_it() -> None:
    code = "def verify(env, conversation):\n    return float('price' in conversation and 'Order ink' in conversation)"
    task = Task(key="t", env="shop", prompt=TASK.prompt, verifier=code)
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment, task)
        await environment.step(call("price", name="ink"))
        assert (await environment.verify()).reward == 1.0


async def test_a_verifier_may_run_here_against_the_instance_there() -> None:
    verifier = Verifier()
    async with platform() as (fleet, server), verifier.run():
        async with environments(server, settings(verifier="local"), grader=verifier) as environment:
            await begun(environment)
            await environment.step(call("order", name="ink"))
            await environment.step(call("submit_final_answer", answer="9"))
            assert (await environment.verify()).reward == 1.0
            assert fleet.uploads == 0


BY_CALLS = """
def verify(env, final_answer=None):
    items = env.db("current").table("items")
    row = items.eq("name", "ink").assert_exists().first()
    assert env.db().query("SELECT count(*) FROM items").rows[0][0] == items.count()
    assert "items" in [table.name for table in env.db().describe().tables]
    assert not env.db().query("SELECT price FROM nowhere").success
    return 1.0 if row["ordered"] == 1 and final_answer == "9" else 0.0
"""
BY_AWAITING = """
async def verify(env, final_answer=None):
    items = env.db().table("items")
    rows = await items.select("ordered").in_("name", ["ink"]).all()
    await items.eq("name", "no such thing").assert_none()
    return 1.0 if rows == [{"ordered": 1}] and await items.eq("ordered", 1).count() == 1 else 0.0
"""


@pytest.mark.parametrize("code", [BY_CALLS, BY_AWAITING])
async def test_a_verifier_that_runs_here_has_the_database_calls_of_the_sdk(code: str) -> None:
    verifier = Verifier()
    task = msgspec.structs.replace(TASK, verifier=code)
    async with platform() as (_, server), verifier.run():
        async with environments(server, settings(verifier="local"), grader=verifier) as environment:
            await begun(environment, task)
            await environment.step(call("order", name="ink"))
            await environment.step(call("submit_final_answer", answer="9"))
            verdict = await environment.verify()
            assert verdict.reward == 1.0, verdict.reason


@pytest.mark.parametrize(
    ("call_of_it", "words"),
    [
        ("env.db().exec('DELETE FROM items')", "only reads"),
        ("env.db().diff(None)", "fleet.verifier = platform"),
    ],
)
async def test_what_a_verifier_here_cannot_ask_is_no_verdict_and_no_zero(call_of_it: str, words: str) -> None:
    verifier = Verifier()
    task = msgspec.structs.replace(TASK, verifier=f"def verify(env):\n    {call_of_it}\n    return 0.0")
    async with platform() as (_, server), verifier.run():
        async with environments(server, settings(verifier="local"), grader=verifier) as environment:
            await begun(environment, task)
            verdict = await environment.verify()
            assert verdict.reward is None
            assert words in verdict.reason


@pytest.mark.parametrize(
    ("chosen", "reward"), [({}, 0.0), ({"partial_reward": True}, 0.0), ({"partial_reward_printed": True}, 0.5)]
)
async def test_a_partial_reward_is_read_off_printed_text_only_if_that_is_chosen(chosen: dict[str, bool], reward: float) -> None:
    code = "def verify(env):\n    print('App mail: 1 done')\n    print('App calendar: 0 missing')\n    return 0.0"
    task = Task(key="t", env="shop", prompt="p", verifier=code)
    async with platform() as (_, server), environments(server, settings(**chosen)) as environment:
        await begun(environment, task)
        assert (await environment.verify()).reward == reward


# Screens


async def test_a_screen_is_shown_with_the_task_and_after_every_action_by_reference() -> None:
    kept: list[EncodedImage] = []

    async def store_image(picture: EncodedImage) -> Image:
        kept.append(picture)
        return Image(object=hashlib.sha256(picture.data).hexdigest(), width=picture.width, height=picture.height)

    async with platform() as (fleet, server), environments(server, store_image=store_image) as environment:
        start = await begun(environment, SCREEN_TASK)
        assert fleet.instances["inst1"].body["image_type"] == "mcp"
        text, image = start.messages[1].content
        assert text == Text(text="Click.")
        assert isinstance(image, Image)
        step = await environment.step(call("computer", action="left_click", coordinate=[400, 300]))
        text, image = step.messages[0].content
        assert isinstance(text, Text)
        assert text.text.startswith("Tool result:\ndid left_click")
        assert image == Image(object=hashlib.sha256(kept[1].data).hexdigest(), width=4, height=3)
        assert kept[1].data.startswith(b"\x89PNG")
        assert "order" not in str(start.messages[0].content)
        done = await environment.step(call("computer", action="done"))
        assert done.terminated


async def test_coordinates_on_a_grid_become_pixels() -> None:
    async with platform() as (fleet, server), environments(server, settings(grid=True)) as environment:
        start = await begun(environment, SCREEN_TASK)
        assert "Screen resolution: 1000x1000" in str(start.messages[0].content)
        await environment.step(call("computer", action="left_click", coordinate=[500, 1000]))
        failed = await environment.step(call("computer", action="left_click", coordinate=["a", 3]))
        assert read_step_text(failed).startswith("Error: coordinate must be two numbers between 0 and 1000")
        assert fleet.instances["inst1"].shop.clicked == [[SCREEN[0] / 2, SCREEN[1] - 1]]


async def test_a_task_for_a_screen_on_an_instance_without_one_fails_by_name() -> None:
    task = Task(key="click", env="shop", prompt="Click.", modality="browser_use")
    fleet = FleetPlatform()
    fleet.faults.no_screen = True
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(EnvironmentFailed, match="has only: price, order, hang"):
            await environment.open(task)
        await environment.close()
        assert not fleet.running


# Mistakes


@pytest.mark.parametrize(
    ("variables", "spec", "words"),
    [
        ({"FLEET_API_KEY": ""}, "fleet", "needs a key: set FLEET_API_KEY"),
        ({}, "fleet:orchestrator", "is not an address"),
        ({}, "fleet:https://user:word@x", "FLEET_API_KEY"),
        ({"FLEET_BASE_URL": "ftp://x"}, "fleet", "'ftp://x' is not an address"),
    ],
)
def test_a_mistake_gets_one_line(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spec: str, words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words) as caught:
        build_environment_factory(spec, verifier=NoGrader())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(key="t", prompt="p"), "task t names no Fleet environment"),
        (Task(key="t", env="shop", prompt="p", modality="smell"), "must be one of tool_use"),
        (Task(key="t", env="shop", prompt="p", env_variables={"X": float("nan")}), "cannot be sent"),
    ],
)
async def test_a_task_that_cannot_be_played_fails_by_name(task: Task, words: str) -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        with pytest.raises(EnvironmentFailed, match=words):
            await environment.open(task)
        assert not fleet.instances
