"""Sums and products asked in words, two answered before: the last number of the answer counts."""

import re

from fleetbus import ChatMessage, Start, Step, Verdict

EXAMPLES = (("What is 3 + 4?", "3 + 4 = 7"), ("What is 6 × 2?", "6 × 2 = 12"))
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


class Sums:
    """One question, one answer."""

    replayable = True

    async def open(self, task):
        self.task, self.said = task, ""

    async def reset(self):
        messages = [ChatMessage(role="system", content="You calculate.")]
        for question, answer in EXAMPLES:
            messages += [ChatMessage(role="user", content=question), ChatMessage(role="assistant", content=answer)]
        return Start(messages=(*messages, ChatMessage(role="user", content=self.task.prompt)))

    async def step(self, action):
        self.said = action.text
        return Step(terminated=True)

    async def verify(self):
        numbers = NUMBER.findall(self.said)
        return Verdict(reward=float(bool(numbers) and float(numbers[-1].replace(",", "")) == self.task.config["answer"]))

    async def state(self):
        return {"said": self.said}

    async def close(self):
        """Nothing to release."""
