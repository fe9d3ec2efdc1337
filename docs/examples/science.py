"""ScienceWorld's tasks in a class of one's own: a simulator in a Java process for each episode.

Train on it: fleetbus up --environment science.py:Science --tasks science.json
"""

from scienceworld import ScienceWorldEnv

from fleetbus import Action, ChatMessage, Start, Step, Task, Verdict

HINT = "Answer with one action, as in: open door to kitchen, focus on thermometer, pick up pot."


class Science:
    """One episode. The task's config has `name`, as in find-plant, and may have `variation`, `simplifications` and `moves`."""

    replayable = True  # the same actions lead to the same words, so a killed worker's episodes continue elsewhere

    def open(self, task: Task) -> None:
        config, self.score = task.config, 0
        self.world = ScienceWorldEnv("", envStepLimit=config.get("moves", 100))
        self.world.load(config["name"], config.get("variation", 0), config.get("simplifications", "easy"))

    def reset(self) -> Start:
        seen, told = self.world.reset()
        return Start(messages=(ChatMessage(role="user", content=f"{told['taskDesc']}\n{HINT}\n{seen}"),))

    def step(self, action: Action) -> Step:
        seen, gained, over, told = self.world.step(action.text.strip())
        self.score = told["score"]
        return Step(messages=(ChatMessage(role="user", content=seen),), reward=gained / 100, terminated=over)

    def state(self) -> dict[str, object]:
        return {"score": self.score}

    def verify(self) -> Verdict:
        return Verdict(reward=self.score / 100)

    def close(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
