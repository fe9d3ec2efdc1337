"""Countdown: an expression of the given numbers, each once, that has the target as its value."""

import ast
import operator

from fleetbus import ChatMessage, Start, Step, Verdict

EXAMPLES = (("Make 17 from 3, 4, 5.", "3 * 4 + 5 = 17"), ("Make 2 from 9, 4, 3.", "9 - 4 - 3 = 2"))
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 60


class Countdown:
    """One question, one answer; a well-formed answer with the wrong value or numbers is worth a tenth."""

    replayable = True

    async def open(self, task):
        self.task, self.said = task, ""

    async def reset(self):
        messages = [ChatMessage(role="system", content="You solve number puzzles.")]
        for question, answer in EXAMPLES:
            messages += [ChatMessage(role="user", content=question), ChatMessage(role="assistant", content=answer)]
        return Start(messages=(*messages, ChatMessage(role="user", content=self.task.prompt)))

    async def step(self, action):
        self.said = action.text
        return Step(terminated=True)

    async def verify(self):
        numbers: list[int] = []
        try:
            value = _compute(ast.parse(self.said.strip()[:LONGEST].partition("=")[0].strip(), mode="eval").body, numbers)
        except (SyntaxError, ValueError):
            return Verdict(reward=0.0)
        right = value == self.task.config["target"] and sorted(numbers) == sorted(self.task.config["numbers"])
        return Verdict(reward=1.0 if right else 0.1)

    async def state(self):
        return {"said": self.said}

    async def close(self):
        """Nothing to release."""


def _compute(node: ast.AST, numbers: list[int]) -> int:
    """The value of an expression of whole numbers; those it is made of go into ``numbers``. Raises `ValueError`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_compute(node.left, numbers), _compute(node.right, numbers))
    raise ValueError("not an expression of whole numbers")
