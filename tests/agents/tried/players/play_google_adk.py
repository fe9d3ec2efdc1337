"""Google's Agent Development Kit: its own loop over Gemini's protocol."""

import asyncio

from common import ARGUMENTS, COMMAND, PROMPT, look
from google.adk.agents import LlmAgent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.tools.mcp_tool import McpToolset, StdioConnectionParams
from google.genai import types
from mcp import StdioServerParameters


async def main() -> None:
    served = McpToolset(
        connection_params=StdioConnectionParams(
            server_params=StdioServerParameters(command=COMMAND, args=ARGUMENTS), timeout=60
        )
    )
    agent = LlmAgent(name="looker", model=Gemini(model="policy"), instruction="Be brief.", tools=[look, served])
    runner = InMemoryRunner(agent=agent, app_name="tried")
    session = await runner.session_service.create_session(app_name="tried", user_id="user")
    said = types.Content(role="user", parts=[types.Part(text=PROMPT)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=said):
        if event.is_final_response() and event.content:
            print("".join(part.text or "" for part in event.content.parts))
    await served.close()


asyncio.run(main())
