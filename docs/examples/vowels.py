"""Training from a script, with an environment defined in it: the policy learns to say words with many vowels.

Run it: python vowels.py (a minute or two on two cores; a second call resumes the run, or returns at once if it has finished)
"""

import fleetbus


class Vowels:
    """One question, one answer. Ordinary functions run in threads; `async def` works as well."""

    replayable = True  # the same answers lead to the same observations

    def open(self, task):
        self.prompt = task.prompt
        self.answer = ""

    def reset(self):
        return fleetbus.Start(messages=(fleetbus.ChatMessage(role="user", content=self.prompt),))

    def step(self, action):
        self.answer = action.text
        return fleetbus.Step(terminated=True)

    def state(self):
        return {"answer": self.answer}

    def verify(self):
        return fleetbus.Verdict(reward=min(sum(letter in "aeiou" for letter in self.answer), 4) / 4)

    def close(self):
        """Nothing to release."""


tasks = [fleetbus.Task(key=f"say-{number}", prompt="Say something.") for number in range(32)]
summary = fleetbus.train(
    Vowels,
    tasks,
    name="vowels",
    steps=15,
    learner_groups=4,
    learner_learning_rate=5e-4,
    learner_warmup_steps=2,
    episode_max_tokens=10,
    evaluation_episodes=0,
)
print("reward", summary.reward_by_step[0], "->", summary.reward_by_step[-1])
