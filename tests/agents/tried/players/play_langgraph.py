"""LangChain's agent on LangGraph, over OpenAI's chat completions."""

import asyncio

from common import ARGUMENTS, COMMAND, PROMPT, look
from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI


async def main() -> None:
    servers = MultiServerMCPClient({"places": {"command": COMMAND, "args": ARGUMENTS, "transport": "stdio"}})
    agent = create_agent(ChatOpenAI(model="policy"), [look, *await servers.get_tools()])
    print((await agent.ainvoke({"messages": [{"role": "user", "content": PROMPT}]}))["messages"][-1].content)


asyncio.run(main())
