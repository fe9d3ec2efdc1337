"""The Claude Agent SDK: the loop of the Claude Code that is bundled with it, a tool in its own process, and a server."""

import asyncio

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, create_sdk_mcp_server, query, tool
from common import ARGUMENTS, COMMAND, PROMPT
from common import look as look_at


@tool("look", "Looks at a place and says what is there.", {"at": int})
async def look(given):
    return {"content": [{"type": "text", "text": look_at(given["at"])}]}


async def main() -> None:
    own = create_sdk_mcp_server(name="own", tools=[look])
    servers = {"own": own, "places": {"type": "stdio", "command": COMMAND, "args": ARGUMENTS}}
    allowed = ["mcp__own__look", "mcp__places__peek"]
    options = ClaudeAgentOptions(model="policy", mcp_servers=servers, allowed_tools=allowed)
    async for message in query(prompt=PROMPT, options=options):
        if isinstance(message, AssistantMessage):
            print("".join(getattr(block, "text", "") for block in message.content))


asyncio.run(main())
