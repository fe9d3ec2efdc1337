"""Inspect's react agent, evaluated on one sample."""

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL
from common import look as look_at
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.tool import mcp_server_stdio, mcp_tools, tool


@tool
def look():
    async def execute(at: int) -> str:
        """Looks at a place and says what is there.

        Args:
            at: The number of the place.
        """
        return look_at(at)

    return execute


served = mcp_tools(mcp_server_stdio(name="places", command=COMMAND, args=ARGUMENTS))
model = get_model("openai/policy", base_url=URL, api_key=KEY)
(log,) = eval(Task([Sample(PROMPT)], solver=react(tools=[look(), served])), model=model, display="plain")
print(log.samples[0].output.completion)
