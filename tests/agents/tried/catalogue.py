"""The agents that are tried as they are shipped: what is installed of each, and how it is started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from tests.agents.tried import programs
from tests.agents.tried.place import Place

PYTHON, JAVASCRIPT = "pip", "npm"


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """``packages`` are installed into an environment of its own, the first is the agent, whose version is told. ``start`` gives
    its command. ``policy`` is one of `policy.POLICIES`. ``kills`` are the calls in whose middle the inference worker and the
    gateway die. ``needed``: what is not its default."""

    name: str
    by: str
    packages: tuple[str, ...]
    start: Callable[[Place], list[str]]
    policy: str = "tools"
    kills: tuple[int, int] = (1, 2)
    needed: str = ""
    environment: str = ""
    """The name of the agent whose environment it shares; empty: it has its own."""
    newer_python: bool = False
    """It needs Python 3.12."""

    @property
    def place(self) -> str:
        """The folder of its environment."""
        return self.environment or self.name

    @property
    def package(self) -> str:
        """Without what is added in brackets."""
        return self.packages[0].partition("[")[0]


def python(
    name: str,
    *packages: str,
    policy: str = "tools",
    kills: tuple[int, int] = (1, 2),
    needed: str = "",
    newer_python: bool = False,
) -> Shipped:
    """An agent made of a package for Python: its player has its name."""

    def start(place: Place) -> list[str]:
        return place.python(f"play_{name.replace('-', '_')}.py")

    return Shipped(
        name=name,
        by=PYTHON,
        packages=packages,
        start=start,
        policy=policy,
        kills=kills,
        needed=needed,
        newer_python=newer_python,
    )


def javascript(name: str, *packages: str, player: str = "", way: str = "", environment: str = "", needed: str = "") -> Shipped:
    """The same for Node; a player may go several ways."""

    def start(place: Place) -> list[str]:
        return [*place.node(f"play_{(player or name).replace('-', '_')}.mjs"), way]

    return Shipped(name=name, by=JAVASCRIPT, packages=packages, start=start, environment=environment, needed=needed)


program = partial(Shipped, by=JAVASCRIPT)

AI_SDK = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "@ai-sdk/google", "@ai-sdk/mcp", "zod")

SHIPPED = (
    program(
        name="claude-code",
        packages=("@anthropic-ai/claude-code",),
        start=programs.claude_code,
        needed="`-p PROMPT --permission-mode bypassPermissions`",
    ),
    program(
        name="codex",
        packages=("@openai/codex",),
        start=programs.codex,
        needed="the endpoint as a provider of `-c`, its own sandbox off",
    ),
    program(
        name="gemini-cli",
        packages=("@google/gemini-cli",),
        start=programs.gemini_cli,
        needed="`gemini-api-key` as the chosen way in its settings, `--yolo`",
    ),
    program(name="opencode", packages=("opencode-ai",), start=programs.opencode, needed="the endpoint as a provider"),
    program(name="qwen-code", packages=("@qwen-code/qwen-code",), start=programs.qwen_code, needed="`--yolo`"),
    program(
        name="pi", packages=("@mariozechner/pi-coding-agent",), start=programs.pi, needed="the endpoint in its `models.json`"
    ),
    program(
        name="continue", packages=("@continuedev/cli",), start=programs.continue_cli, needed="the endpoint in its settings"
    ),
    program(name="cline", packages=("cline",), start=programs.cline, needed="the endpoint in its settings"),
    Shipped(
        name="aider",
        by=PYTHON,
        packages=("aider-chat",),
        start=programs.aider,
        policy="edits",
        kills=(0, 1),
        needed="`--yes-always`",
    ),
    javascript("ai-sdk-openai", *AI_SDK, player="ai-sdk", way="openai", environment="ai-sdk"),
    javascript("ai-sdk-compatible", *AI_SDK, player="ai-sdk", way="compatible", environment="ai-sdk"),
    javascript("ai-sdk-anthropic", *AI_SDK, player="ai-sdk", way="anthropic", environment="ai-sdk"),
    javascript("ai-sdk-google", *AI_SDK, player="ai-sdk", way="google", environment="ai-sdk"),
    javascript("langgraph-js", "@langchain/langgraph", "@langchain/openai", "@langchain/core", "langchain", "zod"),
    javascript("mastra", "@mastra/core", "@mastra/mcp", "zod"),
    javascript("codex-sdk", "@openai/codex-sdk"),
    javascript("claude-agent-sdk-js", "@anthropic-ai/claude-agent-sdk", "zod"),
    python("strands", "strands-agents[openai]"),
    python("google-adk", "google-adk", "mcp"),
    python(
        "autogen", "autogen-agentchat", "autogen-ext[openai,mcp]", "mcp<2", needed="`max_tool_iterations`, which is 1; `mcp<2`"
    ),
    python("crewai", "crewai"),
    python("agent-framework", "agent-framework-core", "agent-framework-openai", "mcp", "tenacity"),
    python("llama-index", "llama-index-core", "llama-index-llms-openai-like", "llama-index-tools-mcp"),
    python("qwen-agent", "qwen-agent", "soundfile", "python-dateutil", "tqdm", "mcp<2", policy="nous"),
    python("haystack", "haystack-ai", "mcp-haystack"),
    python("mcp-agent", "mcp-agent[openai]", "mcp<2", needed="`mcp<2`, for it does not know the second"),
    python("inspect_ai", "inspect_ai", "openai", "mcp"),
    python("verifiers", "verifiers", "uv", needed="a runtime of this machine (`subprocess`) and the endpoint as its client"),
    python("openhands-sdk", "openhands-sdk", "openhands-tools", newer_python=True),
    python("smolagents", "smolagents[openai]", policy="code"),
    python("camel", "camel-ai", "mcp<2", needed="`mcp<2`; a token counter, for its own fetches an encoding from outside"),
    python("claude-agent-sdk", "claude-agent-sdk"),
    python("openai-agents", "openai-agents"),
    python("pydantic-ai", "pydantic-ai-slim[openai,mcp]"),
    python("langgraph", "langgraph", "langchain", "langchain-openai", "langchain-mcp-adapters", "mcp<2"),
    python("agno", "agno", "openai", "fastmcp>=4,<5"),
    python("dspy", "dspy", policy="fields"),
)
