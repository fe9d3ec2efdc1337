"""Two tasks as teams write them: a question, and an agent with a tool."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message
from inspect_ai.tool import tool

SUMS = [Sample(input=f"What is {left} + {right}?", target=str(left + right)) for left in range(5) for right in range(4)]


@task
def sums(system: str = "Answer with a number.", shuffle: bool = False) -> Task:
    data = MemoryDataset(list(SUMS))
    if shuffle:
        data.shuffle()
    return Task(dataset=data, solver=[system_message(system), generate()], scorer=match(numeric=True))


@tool
def add():
    async def execute(left: int, right: int) -> str:
        """Add two numbers.

        Args:
            left: The first.
            right: The second.
        """
        return str(left + right)

    return execute


@task
def sums_with_a_tool() -> Task:
    return Task(dataset=SUMS, solver=react(prompt="Use the tool.", tools=[add()]), scorer=includes())
