"""The table of the configuration that decides how episodes are played."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fleetbus.config.table import Settings


class EnvironmentSettings(Settings, frozen=True, kw_only=True):
    """Environment workers."""

    workers: Annotated[
        int,
        Meta(ge=0, description="Environment workers that `up` starts; 0: none, as `fleetbus gateway agents` runs elsewhere"),
    ] = 1
    slots: Annotated[int, Meta(ge=1, description="Episodes at a time per worker")] = 64
    pools: Annotated[
        str, Meta(description="Pools that a worker takes episodes of, comma separated; empty: all of run.pool")
    ] = ""
    session_slots: Annotated[int, Meta(ge=0, description="Step-wise sessions at a time per worker, besides episodes")] = 64
    turns_at_once: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Turns of one episode that are sampled at the same time, where they do not stand on each other: "
            "calls of one agent, seats that act at once; 1: one after another",
        ),
    ] = 8
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts lost with their workers before an episode ends as lost")] = 3
    max_hops: Annotated[int, Meta(ge=1, description="Re-routings of one observation before its episode ends")] = 3
    prompt: Annotated[
        Literal["auto", "compact", "fleet", "template"],
        Meta(description="How tools are described to the policy; auto: compact for the warehouse, fleet elsewhere"),
    ] = "auto"
    examples: Annotated[
        str,
        Meta(
            description="JSON file with the messages of worked conversations, which the policy reads before each task; "
            "`fleetbus episodes RUN EPISODE --output FILE.json` writes one of a recorded episode"
        ),
    ] = ""
    parallel_calls: Annotated[
        int, Meta(ge=1, description="Tool calls of one response executed at the same time, with prompt = template")
    ] = 8
    observation_bytes: Annotated[int, Meta(ge=1024, description="Maximum text of one observation, in bytes")] = 32_768
    processes: Annotated[int, Meta(ge=0, description="Maximum number of processes of pool:MODULE:CLASS; 0: one per slot")] = 0
    devices: Annotated[str, Meta(description="Devices assigned in turn to your own environments, such as cuda:0,cuda:1")] = ""
    sandbox: Annotated[
        Literal["auto", "required", "limits"],
        Meta(
            description="Verifiers on a machine where no sandbox works: auto runs only those that ship with fleetbus, limits "
            "runs all with resource limits, required refuses to start"
        ),
    ] = "auto"
    agent_isolation: Annotated[
        Literal["auto", "required", "off"],
        Meta(
            description="What agents of agent:SPEC run in; auto: the sandbox where one works, without a network, else as the "
            "worker's user; required: the sandbox; off: as the worker's user, with its files and network"
        ),
    ] = "auto"
    agent_files: Annotated[
        str,
        Meta(description="Files and folders that agents in the sandbox read, beside their programs; comma separated"),
    ] = ""
    python: Annotated[
        str,
        Meta(description="Interpreter with the package of verifiers:NAME, inspect:TASK, bfcl:CATEGORY or tau2:DOMAIN: a path"),
    ] = ""
    agent_crash_reward: Annotated[
        str,
        Meta(
            pattern=r"^(-?\d+(\.\d+)?)?$",
            title="a number, or nothing",
            description="Reward of an episode whose agent of agent:SPEC ends with an error after an answer that it cannot use; "
            "empty: it is not trained",
        ),
    ] = "0"
    agent_formats: Annotated[
        Literal["told", "refused"],
        Meta(
            description="The formats that agents want of an answer - JSON, a schema, a forced tool: told to the policy in a "
            "system message, with nothing that limits its answer, or refused with a 400"
        ),
    ] = "told"
    agent_side_calls: Annotated[
        Literal["untrained", "trained"],
        Meta(
            description="Calls of agents beside their task, such as the title of a chat: without tools where the agent has "
            "some, over after one answer, with another system prompt or few tokens"
        ),
    ] = "untrained"
    agent_reward_url: Annotated[
        bool,
        Meta(
            description="Give agents FLEETBUS_REWARD_URL among their variables, where the task has no verifier: only for "
            "agents that execute nothing that the policy says, which could post its own reward"
        ),
    ] = False
    boxes: Annotated[
        Literal["auto", "docker", "sandbox"],
        Meta(description="What Harbor tasks are played in; auto: containers where a Docker engine answers, else the sandbox"),
    ] = "auto"
    warm: Annotated[int, Meta(ge=0, description="Containers or sandboxes that wait for episodes of a Harbor task")] = 0
    max_abs_reward: Annotated[
        float, Meta(gt=0, le=1e12, description="Largest reward, either way; an episode with another one is not trained")
    ] = 1e6
    pass_variables: Annotated[
        str,
        Meta(description="Variables that process:KIND:COMMAND and agents get besides PATH and the like, comma separated"),
    ] = ""
    task_urls: Annotated[
        str, Meta(description="Servers that a task's config may name, beside those of the spec: URLs, comma separated; *: any")
    ] = ""
    task_variables: Annotated[
        str, Meta(description="Variables whose values a task's config may have sent to its server, comma separated")
    ] = ""
    task_modules: Annotated[
        str, Meta(description="Modules that a task's config may have imported, beside installed plugins; comma separated")
    ] = ""
    images: Annotated[bool, Meta(description="Show the images of environments to a vision model")] = False
    context_tools: Annotated[
        bool, Meta(description="Offer tools that search and page through earlier messages and truncated output")
    ] = False
    context_status: Annotated[bool, Meta(description="End every observation with the turns and tokens used so far")] = False
    output_chars: Annotated[
        int, Meta(ge=500, description="Maximum characters of tool output per message when context tools are offered")
    ] = 10_000
    compaction: Annotated[
        Literal["off", "drop", "summarise"],
        Meta(description="Before a context is full: drop older turns, or have the policy summarise them; off: end the episode"),
    ] = "off"
    compaction_share: Annotated[
        float, Meta(gt=0, lt=1, description="Share of inference.max_model_len that a context fills before it is compacted")
    ] = 0.75
    compaction_turns: Annotated[int, Meta(ge=1, description="Turns that stay when older ones are dropped")] = 4
