"""Two seats, one of them another model's: a simulated customer, who talks to the policy and is not trained.

Train on it, with a server of chat completions for the customer:
fleetbus up --environment customer.py:Desk --tasks customer.json --seat customer=http://127.0.0.1:8000/v1
"""

import fleetbus

TURNS = 2
"""Of each side."""


def write(text):
    """A message to whoever acts next."""
    return (fleetbus.ChatMessage(role="user", content=text),)


class Desk:
    """The customer speaks first; the policy is worth what it understood: the item's name in its last answer."""

    replayable = True  # the same answers lead to the same observations

    def open(self, task):
        self.item, self.said = task.prompt, []

    def reset(self):
        prompt = f"You are a customer of a shop, and want your {self.item} repaired. Write only what you say, in one sentence."
        return fleetbus.Start(messages=write(prompt), seat="customer")

    def step(self, action):
        self.said.append(action.text)
        if len(self.said) == 2 * TURNS:
            return fleetbus.Step(terminated=True)
        return fleetbus.Step(messages=write(action.text), seat=("customer", "desk")[len(self.said) % 2])

    def state(self):
        return {"said": self.said}

    def verify(self):
        return fleetbus.Verdict(reward=float(self.item in self.said[-1].lower()))

    def close(self):
        """Nothing to release."""
