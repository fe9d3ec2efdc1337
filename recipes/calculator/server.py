"""A calculator as an MCP server: one tool, which adds, subtracts and multiplies."""

import operator

from mcp.server import MCPServer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def make_server(task):
    server = MCPServer("calculator")

    @server.tool()
    def calculate(left: int, sign: str, right: int) -> int:
        """The result of two numbers; sign is +, - or *."""
        return OPERATIONS[sign](left, right)

    return server


make_server.replayable = True
