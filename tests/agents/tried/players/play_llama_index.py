"""LlamaIndex's FunctionAgent: its own loop over OpenAI's chat completions."""

import asyncio

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL, look
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from llama_index.tools.mcp import BasicMCPClient, McpToolSpec


async def main() -> None:
    model = OpenAILike(
        model="policy", api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, context_window=100_000
    )
    served = await McpToolSpec(client=BasicMCPClient(COMMAND, args=ARGUMENTS)).to_tool_list_async()
    print(await FunctionAgent(tools=[look, *served], llm=model, system_prompt="Be brief.").run(PROMPT))


asyncio.run(main())
