"""An adapter in a package of its own: pip install ./docs/examples/adapter, then fleetbus up --environment dice:6 ..."""

import random
from functools import partial

from fleetbus import ChatMessage, Start, Step, UserError, Verdict


def build(context):
    """What `--environment dice:SIDES` asks for: a callable that makes the environment of one episode."""
    if not context.rest.isdecimal() or int(context.rest) < 2:
        raise UserError(f"environment {context.spec!r}: the number of sides must be 2 or more, as in dice:6")
    return partial(Dice, int(context.rest))


class Dice:
    """Say what the die of the task's seed shows."""

    replayable = True

    def __init__(self, sides):
        self.sides = sides

    def open(self, task):
        self.shown = random.Random(task.seed).randint(1, self.sides)
        self.reward = 0.0

    def reset(self):
        return Start(messages=(ChatMessage(role="user", content=f"Guess the die, from 1 to {self.sides}."),))

    def step(self, action):
        self.reward = float(action.text.strip() == str(self.shown))
        return Step(terminated=True)

    def state(self):
        return {"shown": self.shown}

    def verify(self):
        return Verdict(reward=self.reward)

    def close(self):
        pass
