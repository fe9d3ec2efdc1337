"""A complete environment in one file: guess a number between 1 and 100, with hints.

Train on it: fleetbus up --environment guess:Guess --tasks guess.json
"""

import random
import re

from fleetbus import Action, ChatMessage, Start, Step, Task, Verdict


class Guess:
    """One episode. The task's seed selects the number, its config may set the number of tries."""

    replayable = True  # the same guesses lead to the same hints, so a killed worker's episodes continue elsewhere

    async def open(self, task: Task) -> None:
        self.number = random.Random(task.seed).randint(1, 100)
        self.tries = int(task.config.get("tries", 7))
        self.prompt = task.prompt
        self.found = False

    async def reset(self) -> Start:
        prompt = f"{self.prompt}\nGuess my number between 1 and 100. You have {self.tries} tries."
        return Start(messages=(ChatMessage(role="user", content=prompt),))

    async def step(self, action: Action) -> Step:
        self.tries -= 1
        guessed = re.search(r"\d+", action.text)
        self.found = guessed is not None and int(guessed[0]) == self.number
        if self.found or self.tries == 0:
            return Step(terminated=True)
        if guessed is None:
            hint = "That is not a number."
        else:
            hint = "Higher." if int(guessed[0]) < self.number else "Lower."
        return Step(messages=(ChatMessage(role="user", content=f"{hint} {self.tries} tries left."),))

    async def state(self) -> dict[str, object]:
        return {"number": self.number, "tries": self.tries}

    async def verify(self) -> Verdict:
        return Verdict(reward=1.0 if self.found else 0.0)

    async def close(self) -> None:
        """Nothing to release."""
