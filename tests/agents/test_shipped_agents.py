"""Claude Code, Codex and Gemini CLI as they are shipped repair repositories, as `agent:SPEC` inside the default sandbox, with a
scripted policy that works with their own tools: `just test-agents`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.config.settings import Configuration, EnvironmentSettings, InferenceSettings, LimitSettings
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, SamplingSettings, Task
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.inference.base import Sampler
from tests.agents.delegation_policy import DelegatingSampler, build_task
from tests.agents.repair_policy import RepairingSampler
from tests.agents.repairs import REPAIRS
from tests.agents.shipped_agent import AGENTS
from tests.agents.tried.outcome import write_shown
from tests.agents.tried.place import find_node
from tests.agents.tried.policy import ShownTemplate
from tests.support.processes import children
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment

SCRIPT = Path(__file__).with_name("shipped_agent.py")
ENVIRONMENTS = Path(os.environ.get("AGENTS_ENVIRONMENTS") or "/nonexistent")
PROGRAMS = {
    "claude_code_streamed": ("claude-code", "@anthropic-ai/claude-code-*/claude"),
    "codex_streamed": ("codex", "@openai/codex-*/vendor/*/bin/codex"),
    "gemini_cli_streamed": ("gemini-cli", "@google/gemini-cli/bundle/gemini.js"),
}
"""The environment of each, and in it the native program, which a starter in JavaScript only finds, or the one of Node."""

LIMITS = LimitSettings(open=30, reset=120, step=120, action=60, verify=60, close=30, episode=300, grace=10, drain=10)
MAX_TOKENS = 1 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENTS.is_dir(), reason="AGENTS_ENVIRONMENTS names no folder: `just test-agents`"),
]


def find_program(name: str) -> tuple[list[str], str]:
    """Its command, and the folder that it reads."""
    environment, pattern = PROGRAMS[name]
    modules = ENVIRONMENTS.resolve() / environment / "node_modules"
    programs = sorted(modules.glob(pattern))
    assert programs, f"{modules} has no {pattern}"
    before = [str(find_node(ENVIRONMENTS.resolve()) / "node")] if pattern.endswith(".js") else []
    return [*before, str(programs[0])], str(programs[0].parent)


@asynccontextmanager
async def playing(name: str, sampler: Sampler) -> AsyncIterator[SmallDeployment]:
    command, folder = find_program(name)
    settings = EnvironmentSettings(slots=1, agent_isolation="required", agent_files=folder)
    configuration = build_configuration(
        limits=LIMITS, environment=settings, inference=InferenceSettings(max_model_len=MAX_TOKENS)
    )
    verifier = Verifier(VerifierLimits(seconds=40))
    spec = f"agent:{sys.executable} {SCRIPT} {name} {' '.join(command)}"
    factory = build_environment_factory(spec, verifier=verifier, configuration=Configuration(environment=settings))
    async with small_deployment(configuration=configuration) as fleet, verifier.run(), factory.run():
        fleet.inference("i1", sampler=sampler, template=ShownTemplate())
        worker = fleet.environment("e1", make=factory)
        yield fleet
        worker.drain.set()
        await worker.ended.wait()  # before its verifier


async def play(fleet: SmallDeployment, episode: str, task: Task) -> EpisodeFinished:
    asked = EpisodeRequested(
        episode_id=episode,
        group_id=episode,
        sample_index=0,
        split="train",
        task=task,
        policy="default",
        sampling=SamplingSettings(max_tokens=1 << 14),
        max_turns=20,
        max_tokens=MAX_TOKENS,
        deadline_ns=fleet.bus.now_ns() + 300 * 10**9,
    )
    await fleet.stored(fleet.subjects.task("default", episode), asked)
    with anyio.fail_after(300):
        return await fleet.result(episode)


async def list_told(fleet: SmallDeployment, *roles: str) -> str:
    """All that was said in these roles."""
    messages = [message for each in await fleet.observations() for message in each.messages]
    return "\n".join(str(message.content) for message in messages if message.role in roles)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_as_shipped_repairs_five_repositories_in_the_default_sandbox(name: str) -> None:
    async with playing(name, RepairingSampler("right")) as fleet:
        results = [await play(fleet, each.name, each.build_task()) for each in REPAIRS]
        told = await list_told(fleet, "tool")
        report = await audit_run(fleet.bus, fleet.subjects)
    print(told[-6000:], *((each.task_key, each.info) for each in results), sep="\n")
    assert [(each.outcome, each.reward) for each in results] == [("completed", 1.0)] * len(REPAIRS)
    assert told.count("AssertionError") >= len(REPAIRS) and told.count("OK") >= len(REPAIRS), "its tests fail, then pass"
    assert told.count("Name:\thead") >= len(REPAIRS), "what its shell starts reads /proc"
    assert [each.info["calls_extending"] for each in results] == [4] * len(REPAIRS), "each call continues the one before"
    assert report.balanced, report.findings
    assert not children()
    write_shown(PROGRAMS[name][0], repairs=len(REPAIRS))


@pytest.mark.parametrize("name", AGENTS)
async def test_a_wrong_edit_of_an_agent_as_shipped_is_worth_nothing(name: str) -> None:
    async with playing(name, RepairingSampler("wrong")) as fleet:
        results = [await play(fleet, each.name, each.build_task()) for each in REPAIRS]
    assert [(each.outcome, each.reward) for each in results] == [("completed", 0.0)] * len(REPAIRS)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_as_shipped_reads_an_image_and_starts_a_sub_agent(name: str) -> None:
    async with playing(name, DelegatingSampler()) as fleet:
        result = await play(fleet, "e", build_task())
        told = await list_told(fleet, "tool", "user")  # data beside a result is no part of it
    print(told[-6000:], result.info, result.error, sep="\n")
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert re.search(r"(image|inlineData) left out", told), "what it read came as an image"
    begun: Any = result.info["segments_begun"]
    assert begun["sub_agent"] == 1, begun
    write_shown(PROGRAMS[name][0], images=True, sub_agents=True)
