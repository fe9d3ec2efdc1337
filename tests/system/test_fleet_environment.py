"""Episodes on a Fleet-compatible platform: from making an instance to its end, and the table of what may go wrong."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, FleetSettings, LimitSettings, RunSettings
from fleetbus.errors import UserError
from schemas import Action, Image, Task, Text
from tests.support.fleet_platform.instance import SCREEN
from tests.support.fleet_platform.platform import KEY, FleetPlatform
from tests.support.http_server import LocalServer, serving
from workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from workers.environment.fleet import host as fleet_host
from workers.environment.fleet.api import FleetRefused, FleetUnavailable
from workers.environment.fleet.factory import fleet_factory
from workers.environment.mcp_connection import ServerGone
from workers.environment.mcp_environment import McpEnvironment
from workers.environment.pictures import Picture
from workers.environment.specs import environment_factory
from workers.environment.verifier import Verifier, VerifierTools

VERIFIER = """
async def verify(env, final_answer=None, conversation=None):
    rows = await env.query("SELECT ordered FROM items WHERE name = ?", ["ink"])
    return 1.0 if rows[0]["ordered"] == 1 and final_answer == "9" else 0.0
"""

TASK = Task(
    key="buy-ink",
    env="shop:1.2",
    prompt="Order ink, then call submit_final_answer with its price.",
    env_variables={"LOGGED_IN_NAME": "Ada"},
    config={"data_key": "small:0.4"},
    seed=7,
    verifier=VERIFIER,
)
SCREEN_TASK = Task(key="click", env="shop", prompt="Click.", modality="computer_use", verifier="def verify(env): return 1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.delenv("RUNNER_AUTH_TOKEN", raising=False)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr(fleet_host, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_host, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("workers.environment.fleet.grader.FIRST_PAUSE_SECONDS", 0.01)


class NoGrader:
    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        raise AssertionError("the platform grades")


@asynccontextmanager
async def platform(given: FleetPlatform | None = None) -> AsyncIterator[tuple[FleetPlatform, LocalServer]]:
    made = given or FleetPlatform()
    async with serving(made.app) as server:
        yield made, server


def settings(*, call_seconds: float = 60.0, **fleet: Any) -> Configuration:
    return Configuration(
        run=RunSettings(name="tested"), limits=LimitSettings(tool_call=call_seconds), fleet=FleetSettings(**fleet)
    )


@asynccontextmanager
async def environments(
    server: LocalServer, configuration: Configuration | None = None, **options: Any
) -> AsyncIterator[McpEnvironment]:
    """One environment, not yet open, closed at the end."""
    given: dict[str, Any] = {"grader": NoGrader(), "prompt": "fleet", "observation_bytes": 32_768, **options}
    make, running = fleet_factory("fleet", server.url, configuration=configuration or settings(), **given)
    with anyio.fail_after(45):
        async with running():
            environment = make()
            assert isinstance(environment, McpEnvironment)
            try:
                yield environment
            finally:
                await environment.close()


async def begun(environment: McpEnvironment, task: Task = TASK) -> Start:
    await environment.open(task)
    return await environment.reset()


def call(tool: str, /, **arguments: Any) -> Action:
    text = "<tool_call>" + json.dumps({"name": tool, "arguments": arguments}) + "</tool_call>"
    return Action(episode_id="e", attempt=1, turn=0, text=text)


def seen(step: Step) -> str:
    (message,) = step.messages
    assert isinstance(message.content, str)
    return message.content


# The straight line


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
        assert seen(await environment.step(call("price", name="ink"))) == "Tool result:\n9"
        assert seen(await environment.step(call("order", name="ink"))) == "Tool result:\nordered"
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
            factory = environment_factory(spec, verifier=NoGrader(), configuration=settings())
            with anyio.fail_after(30):
                async with factory.running():
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
        assert seen(step).startswith('Error: unknown tool "prise". Available tools: price')
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
    async with platform() as (fleet, server), verifier.running():
        async with environments(server, settings(verifier="local"), grader=verifier) as environment:
            await begun(environment)
            await environment.step(call("order", name="ink"))
            await environment.step(call("submit_final_answer", answer="9"))
            assert (await environment.verify()).reward == 1.0
            assert fleet.uploads == 0


async def test_a_partial_reward_is_read_off_what_the_verifier_printed() -> None:
    code = "def verify(env):\n    print('App mail: 1 done')\n    print('App calendar: 0 missing')\n    return 0.0"
    task = Task(key="t", env="shop", prompt="p", verifier=code)
    async with platform() as (_, server):
        for partial, reward in ((False, 0.0), (True, 0.5)):
            async with environments(server, settings(partial_reward=partial)) as environment:
                await begun(environment, task)
                assert (await environment.verify()).reward == reward


# Screens


async def test_a_screen_is_shown_with_the_task_and_after_every_action_by_reference() -> None:
    kept: list[Picture] = []

    async def keep(picture: Picture) -> Image:
        kept.append(picture)
        return Image(object=hashlib.sha256(picture.data).hexdigest(), width=picture.width, height=picture.height)

    async with platform() as (fleet, server), environments(server, keep=keep) as environment:
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
        assert seen(failed).startswith("Error: coordinate must be two numbers between 0 and 1000")
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


# What may go wrong


async def test_a_refused_key_fails_at_once_and_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FleetPlatform()
    fleet.faults.refuse_key = True
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetRefused, match="HTTP 401") as caught:
            await environment.open(TASK)
        assert [path for method, path in fleet.requests if method == "POST"] == ["/v1/env/instances"]
    output = capsys.readouterr()
    assert "[redacted]" in str(caught.value)
    assert KEY not in str(caught.value) + output.out + output.err + repr(environment.__dict__)


async def test_passing_troubles_of_making_an_instance_are_outlived() -> None:
    fleet = FleetPlatform()
    fleet.faults.create_errors = [(503, "temporarily overloaded"), (400, {"message": "health check failed"})]
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert len(fleet.instances) == 1


async def test_an_instance_whose_making_was_not_answered_is_found_and_not_made_twice() -> None:
    fleet = FleetPlatform()
    fleet.faults.lose_create_answers = 1
    async with platform(fleet) as (_, server):
        async with environments(server) as environment:
            await begun(environment)
        assert [made.status for made in fleet.instances.values()] == ["stopped"]


async def test_an_account_at_its_limit_makes_episodes_wait_for_each_other() -> None:
    fleet = FleetPlatform()
    fleet.faults.instance_limit = 1
    async with platform(fleet) as (_, server), environments(server) as first, environments(server) as second:
        await begun(first)
        async with anyio.create_task_group() as group:
            group.start_soon(second.open, TASK)
            await fleet.until(lambda: fleet.requests.count(("POST", "/v1/env/instances")) > fleet_host.CREATE_TRIES + 1)
            assert len(fleet.instances) == 1
            await first.close()
        assert [made.status for made in fleet.instances.values()] == ["stopped", "running"]


async def test_an_episode_that_waited_too_long_for_the_accounts_limit_asks_no_more() -> None:
    fleet = FleetPlatform()
    fleet.faults.instance_limit = 1
    async with platform(fleet) as (_, server), environments(server) as first, environments(server) as second:
        await begun(first)
        with anyio.move_on_after(0.2):
            await second.open(TASK)
        await second.close()
        await first.close()
        await fleet.until(lambda: not fleet.running)
        await begun(second)
        assert [made.status for made in fleet.instances.values()] == ["stopped", "running"]


async def test_what_the_platform_refuses_fails_the_episode_with_its_words() -> None:
    fleet = FleetPlatform()
    fleet.faults.create_errors = [(400, {"error_type": "env_not_found", "message": "no environment named shop"})]
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetRefused, match="no environment named shop"):
            await environment.open(TASK)


async def test_a_slow_instance_is_waited_for() -> None:
    fleet = FleetPlatform()
    fleet.faults.pending_polls = 3
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert fleet.instances["inst1"].polls == 3


async def test_an_instance_that_ends_in_error_fails_the_episode_and_is_deleted() -> None:
    fleet = FleetPlatform()
    fleet.faults.pending_polls, fleet.faults.end_in = 1, "error"
    async with platform(fleet) as (_, server), environments(server) as environment:
        with pytest.raises(FleetUnavailable, match="in state error"):
            await environment.open(TASK)
        assert not fleet.running


async def test_a_reset_that_fails_is_only_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FleetPlatform()
    fleet.faults.reset_fails = True
    async with platform(fleet) as (_, server), environments(server) as environment:
        await begun(environment)
        assert seen(await environment.step(call("price", name="pen"))) == "Tool result:\n3"
    assert "fleet_reset_failed" in capsys.readouterr().out


async def test_tools_that_cannot_be_listed_fail_the_episode_and_the_instance_is_deleted() -> None:
    fleet = FleetPlatform()
    fleet.faults.no_mcp = True
    async with platform(fleet) as (_, server), environments(server, settings(ready_seconds=0.6)) as environment:
        with pytest.raises(EnvironmentFailed, match=r"tools of Fleet instance inst1 cannot be listed.*HTTP 404"):
            await environment.open(TASK)
        await environment.close()
        assert not fleet.running


async def test_a_call_that_fails_is_an_observation() -> None:
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment)
        step = await environment.step(call("price", name="gold"))
        assert seen(step) == 'Error: {"error": "no such item"}'
        assert (step.tool_calls, step.tool_errors) == (1, 1)
        assert seen(await environment.step(call("price"))).startswith("Error: ")


async def test_a_call_that_times_out_is_not_sent_again() -> None:
    async with platform() as (fleet, server), environments(server, settings(call_seconds=0.4)) as environment:
        await begun(environment)
        assert "may still have had its effect" in seen(await environment.step(call("hang")))
        assert fleet.instances["inst1"].shop.calls == ["hang"]


async def test_an_instance_that_dies_during_a_call_fails_the_episode() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        shop = fleet.instances["inst1"].shop
        async with anyio.create_task_group() as group:

            async def kill() -> None:
                await shop.hanging.wait()
                await server.kill()

            group.start_soon(kill)
            with pytest.raises(ServerGone):
                await environment.step(call("hang"))
        await server.start()


async def test_an_instance_that_the_platform_ended_fails_the_episode() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        fleet.instances["inst1"].status = "stopped"
        with pytest.raises(ServerGone):
            await environment.step(call("price", name="ink"))


@pytest.mark.parametrize("fault", ["verifier_errors", "judge_errors"])
async def test_a_verifier_that_fails_is_tried_again_and_is_never_a_zero(fault: str) -> None:
    for failures, reward in ((2, 0.0), (9, None)):
        fleet = FleetPlatform()
        setattr(fleet.faults, fault, failures)
        async with platform(fleet) as (_, server), environments(server) as environment:
            await begun(environment)
            assert (await environment.verify()).reward == reward


async def test_a_verifier_that_is_no_python_or_raises_gives_no_verdict() -> None:
    for code, words in (("def verify(env:", "not Python"), ("x = 1", "no function"), ("def verify(env): 1/0", "ZeroDivision")):
        async with platform() as (_, server), environments(server) as environment:
            await begun(environment, Task(key="t", env="shop", prompt="p", verifier=code))
            verdict = await environment.verify()
            assert verdict.reward is None
            assert words in verdict.reason


async def test_a_verifiers_own_code_never_runs_in_the_worker() -> None:
    code = "import os\nraise SystemExit(os.getpid())\ndef verify(env): return 1"
    async with platform() as (_, server), environments(server) as environment:
        await begun(environment, Task(key="t", env="shop", prompt="p", verifier=code))
        assert (await environment.verify()).reward is None


# Instances end


async def test_a_cancelled_open_leaves_no_instance() -> None:
    fleet = FleetPlatform()
    fleet.faults.hold_create = anyio.Event()
    async with platform(fleet) as (_, server), environments(server) as environment:
        async with anyio.create_task_group() as group:
            group.start_soon(environment.open, TASK)
            await fleet.until(lambda: ("POST", "/v1/env/instances") in fleet.requests)
            group.cancel_scope.cancel()
        await environment.close()
        assert not fleet.instances
        fleet.faults.hold_create.set()
        await fleet.until(lambda: [made.status for made in fleet.instances.values()] == ["stopped"])


async def test_a_cancelled_close_still_deletes_the_instance() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await environment.close()
        await fleet.until(lambda: not fleet.running)


async def test_instances_that_nobody_here_knows_of_or_could_delete_end_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetPlatform()
    async with platform(fleet) as (_, server):
        async with environments(server) as unknown, environments(server) as undeletable:
            await begun(undeletable)
            fleet.faults.delete_errors = fleet_host.DELETE_TRIES
            await undeletable.close()
            fleet.faults.lose_create_answers = 1
            monkeypatch.setattr(fleet_host, "LONGEST_PAUSE_SECONDS", 60)
            async with anyio.create_task_group() as group:
                group.start_soon(unknown.open, TASK)
                await fleet.until(lambda: len(fleet.running) == 2)
                group.cancel_scope.cancel()
            await unknown.close()
            assert len(fleet.running) == 2
        assert not fleet.running


async def test_a_deletion_that_fails_for_a_passing_reason_is_repeated() -> None:
    async with platform() as (fleet, server), environments(server) as environment:
        await begun(environment)
        fleet.faults.delete_errors = 2
        await environment.close()
        assert not fleet.running


async def test_a_worker_that_stops_in_the_middle_of_episodes_deletes_all_of_its_instances() -> None:
    async with platform() as (fleet, server):
        make, running = fleet_factory(
            "fleet", server.url, configuration=settings(), grader=NoGrader(), prompt="fleet", observation_bytes=32_768
        )
        with anyio.fail_after(30):
            async with running():
                for _ in range(3):
                    await make().open(TASK)
                assert len(fleet.running) == 3
        assert not fleet.running


async def test_a_worker_that_starts_sweeps_what_dead_workers_of_its_run_left_and_nothing_else() -> None:
    """A dead process is one whose number is free, or belongs to another process by now."""
    fleet = FleetPlatform()
    mine, other = fleet_host.run_prefix("tested"), fleet_host.run_prefix("another")
    left = [
        f"{mine}4194399_5",
        f"{mine}1_999999999999_ab12cd",
        f"{other}4194399_5",
        fleet_host.run_prefix("tested") + "x",
        "foreign",
    ]
    async with platform(fleet) as (_, server), environments(server) as environment:
        for number, label in enumerate((*left, fleet_host.run_prefix("tested") + fleet_host.process_label(1))):
            await fleet._made({"env_key": "shop", "run_id": label}, str(number))
        async with environments(server) as second:
            await fleet.until(lambda: len(fleet.running) == 4)
            await begun(second)
        await environment.close()
        assert {made.body["run_id"] for made in fleet.running} == {*left[2:], mine + fleet_host.process_label(1)}
        fleet.running[0].stop.set()


async def test_the_end_of_one_worker_leaves_the_instances_of_another_in_the_same_process_alone() -> None:
    async with platform() as (fleet, server), environments(server) as staying:
        await begun(staying)
        async with environments(server) as leaving:
            await begun(leaving)
            leaving._connection = None  # nobody closes it
        assert [made.status for made in fleet.instances.values()] == ["running", "stopped"]
        assert seen(await staying.step(call("price", name="pen"))) == "Tool result:\n3"


def test_the_key_is_not_sent_to_instances_over_open_networks() -> None:
    host = fleet_host.FleetHost(base_url="https://x", key=KEY, run="r", settings=FleetSettings())
    assert host.headers_for("https://i.example/mcp") == {"Authorization": f"Bearer {KEY}"}
    assert host.headers_for("http://127.0.0.1:8000/mcp") == {"Authorization": f"Bearer {KEY}"}
    assert host.headers_for("http://i.example/mcp") == {}


CRASHING = """
import sys, anyio
from fleetbus.config.settings import Configuration, RunSettings
from schemas import Task
from workers.environment.specs import environment_factory

async def main():
    configuration = Configuration(run=RunSettings(name="tested"))
    factory = environment_factory("fleet:" + sys.argv[1], verifier=None, configuration=configuration)
    async with factory.running():
        await factory().open(Task(key="t", env="shop", prompt="p"))
        print("open", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_what_a_killed_worker_left_is_deleted_by_the_next_one_of_its_run() -> None:
    async with platform() as (fleet, server):
        with anyio.fail_after(50):
            async with await anyio.open_process([sys.executable, "-c", CRASHING, server.url], stderr=None) as process:
                assert process.stdout is not None
                assert (await process.stdout.receive()).strip() == b"open"
                process.kill()
                await process.wait()
        assert len(fleet.running) == 1
        async with environments(server):
            await fleet.until(lambda: not fleet.running)


async def test_instances_get_heartbeats_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = settings(heartbeat_seconds=10)
    async with platform() as (fleet, server):
        make, running = fleet_factory(
            "fleet", server.url, configuration=configuration, grader=NoGrader(), prompt="fleet", observation_bytes=32_768
        )
        monkeypatch.setattr(fleet_host, "BEATS_PER_INTERVAL", 1000)
        with anyio.fail_after(30):
            async with running():
                environment = make()
                await environment.open(TASK)
                assert fleet.instances["inst1"].body["heartbeat_interval"] == 10
                await fleet.until(lambda: fleet.instances["inst1"].beats >= 2)
                await environment.close()


# Mistakes


@pytest.mark.parametrize(
    ("variables", "spec", "words"),
    [
        ({"FLEET_API_KEY": ""}, "fleet", "needs a key: set FLEET_API_KEY"),
        ({}, "fleet:orchestrator", "is no address"),
        ({"FLEET_BASE_URL": "ftp://x"}, "fleet", "'ftp://x' is no address"),
    ],
)
def test_a_mistake_gets_one_line(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spec: str, words: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words) as caught:
        environment_factory(spec, verifier=NoGrader())
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
