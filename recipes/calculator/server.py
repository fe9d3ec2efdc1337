"""A calculator as an MCP server: one tool, which adds, subtracts and multiplies two numbers."""

import operator
import re

from mcp.server import MCPServer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")


def make_server(task):
    server = MCPServer("calculator")

    @server.tool()
    def calculate(expression: str) -> str:
        """The value of an expression."""
        found = EXPRESSION.fullmatch(expression)
        return str(OPERATIONS[found[2]](int(found[1]), int(found[3]))) if found else "Error: write two numbers and +, - or *"

    return server


make_server.replayable = True
