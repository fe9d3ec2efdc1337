"""Two policies that learn from each other: a proposer sets a problem, and a solver that another learner trains solves it.

Train both (some minutes on two cores; the same command resumes the run):
fleetbus up --environment proposer.py:Spelling --tasks proposer.json --seat solver=train --episode-max-tokens 10
"""

import fleetbus

HARDEST = 4


def count_vowels(text):
    """The vowels of an answer: what a policy that was never told of the game can be asked for."""
    return sum(letter in "aeiou" for letter in text.lower())


class Spelling:
    """The proposer's vowels say how many the solver has to find. Both are worth nothing if it does not; if it does, the solver
    is worth 1 and the proposer more, the harder the problem was."""

    replayable = True  # the same answers lead to the same observations

    def open(self, task):
        self.prompt, self.wanted, self.found = task.prompt, None, None

    def reset(self):
        return fleetbus.Start(messages=(fleetbus.ChatMessage(role="user", content=self.prompt),), seat="proposer")

    def step(self, action):
        if self.wanted is not None:
            self.found = count_vowels(action.text)
            return fleetbus.Step(terminated=True)
        self.wanted = min(count_vowels(action.text), HARDEST)
        problem = fleetbus.ChatMessage(role="user", content=f"Say something with {self.wanted} vowels.")
        return fleetbus.Step(messages=(problem,), seat="solver")

    def state(self):
        return {"wanted": self.wanted, "found": self.found}

    def verify(self):
        if self.found is None:
            return fleetbus.Verdict(reward=None, reason="nothing was answered")
        is_solved = self.found >= self.wanted
        seats = {"proposer": is_solved * self.wanted / HARDEST, "solver": float(is_solved)}
        return fleetbus.Verdict(reward=float(is_solved), seats=seats)

    def close(self):
        """Nothing to release."""
