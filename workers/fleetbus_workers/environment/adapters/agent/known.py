"""Agents and clients that were tried, as data: what `fleetbus agents` lists and `docs/agents.md` shows.

``cases`` are those of ``tests/agents``: what is said of an agent here is what one of them shows, which a test checks.
"""

import msgspec


class KnownAgent(msgspec.Struct, frozen=True, kw_only=True):
    """One agent or client. ``trains``: what held-out success became, by its own loop; empty: not tried. ``needed``: what
    has to be set for it; empty: nothing."""

    name: str
    install: str
    dialects: tuple[str, ...]
    cases: tuple[str, ...]
    trains: str = ""
    needed: str = ""

    @property
    def streams(self) -> bool:
        """True if its streamed answers were tried."""
        return any(case.endswith("_streamed") for case in self.cases)


CHAT, RESPONSES, MESSAGES, GEMINI = "chat completions", "responses", "messages", "gemini"

KNOWN_AGENTS = (
    KnownAgent(
        name="openai",
        install="pip install openai",
        dialects=(CHAT, RESPONSES),
        cases=("openai_chat", "openai_chat_streamed", "openai_responses", "openai_responses_streamed"),
    ),
    KnownAgent(
        name="openai-agents",
        install="pip install openai-agents",
        dialects=(RESPONSES,),
        cases=("openai_agents", "openai_agents_streamed"),
        trains=".313 to .844 in 30 steps",
    ),
    KnownAgent(
        name="anthropic",
        install="pip install anthropic",
        dialects=(MESSAGES,),
        cases=("anthropic_messages", "anthropic_messages_streamed"),
        trains=".313 to .813 in 30 steps",
    ),
    KnownAgent(
        name="google-genai",
        install="pip install google-genai",
        dialects=(GEMINI,),
        cases=("google_genai", "google_genai_streamed"),
        trains=".317 to .754 in 30 steps",
        needed="retry_options, for it repeats nothing otherwise; a call whose connection broke it never repeats",
    ),
    KnownAgent(
        name="langgraph",
        install="pip install langgraph langchain-openai",
        dialects=(CHAT,),
        cases=("langgraph",),
        trains=".328 to .797 in 30 steps",
    ),
    KnownAgent(name="litellm", install="pip install litellm", dialects=(CHAT,), cases=("litellm",)),
    KnownAgent(
        name="pydantic-ai",
        install="pip install 'pydantic-ai-slim[openai]'",
        dialects=(CHAT,),
        cases=("pydantic_ai",),
    ),
    KnownAgent(
        name="smolagents",
        install="pip install 'smolagents[openai]'",
        dialects=(CHAT,),
        cases=("smolagents",),
        needed="tool_choice='auto', for it forces a tool otherwise; it writes its history anew, so every call begins a segment",
    ),
    KnownAgent(
        name="mini-swe-agent",
        install="pip install mini-swe-agent",
        dialects=(CHAT,),
        cases=("mini_swe_agent",),
        needed="an environment class of ten lines that runs its commands in the task's box",
    ),
    KnownAgent(
        name="claude-code",
        install="npm install @anthropic-ai/claude-code",
        dialects=(MESSAGES,),
        cases=("claude_code_streamed",),
        needed="a sandbox with /proc, or none; `-p PROMPT --permission-mode bypassPermissions`",
    ),
    KnownAgent(
        name="codex",
        install="npm install @openai/codex",
        dialects=(RESPONSES,),
        cases=("codex_streamed",),
        needed="a sandbox with /proc, or none; its own sandbox off, the endpoint as a provider of `-c`",
    ),
    KnownAgent(
        name="gemini-cli",
        install="npm install @google/gemini-cli",
        dialects=(GEMINI,),
        cases=("gemini_cli_streamed",),
        needed="`gemini-api-key` as the chosen way in its settings, `--yolo`; its folder in `environment.agent_files`",
    ),
)


def format_rows() -> list[str]:
    """The table of `docs/agents.md`."""
    head = [
        "| agent | install | speaks | streamed | trains (held-out success) | what was needed |",
        "|---|---|---|---|---|---|",
    ]
    return head + [f"| {' | '.join(_list_cells(agent))} |" for agent in KNOWN_AGENTS]


def _list_cells(agent: KnownAgent) -> tuple[str, ...]:
    streamed = "yes" if agent.streams else "not tried"
    done = (agent.trains or "not tried", agent.needed or "nothing")
    return (agent.name, f"`{agent.install}`", ", ".join(agent.dialects), streamed, *done)
