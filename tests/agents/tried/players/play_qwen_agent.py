"""Qwen-Agent's Assistant: its own loop, in which calls are read from the text."""

from common import ARGUMENTS, COMMAND, KEY, PROMPT, URL
from common import look as look_at
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("look")
class Look(BaseTool):
    description = "Looks at a place and says what is there."
    parameters = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}  # noqa: RUF012

    def call(self, params, **kwargs):
        return look_at(**self._verify_json_format_args(params))


server = {"mcpServers": {"places": {"command": COMMAND, "args": ARGUMENTS}}}
model = {"model": "policy", "model_type": "oai", "model_server": URL, "api_key": KEY}
agent = Assistant(llm=model, function_list=["look", server])
*_, answer = agent.run(messages=[{"role": "user", "content": PROMPT}])
print(answer[-1]["content"])
