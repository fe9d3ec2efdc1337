"""Writes the files of ``fleetbus new environment``: a guessing game that can be trained as it is, and changed from there."""

import json


def build_files(name: str, *, asynchronous: bool) -> dict[str, str]:
    """File names and their contents for an environment called ``name``."""
    kind = "".join(part.capitalize() for part in name.split("_"))
    marks = {"@NAME@": name, "@CLASS@": kind}
    marks |= {"@ASYNC@ ": "async ", "@AWAIT@ ": "await "} if asynchronous else {"@ASYNC@ ": "", "@AWAIT@ ": ""}
    marks |= {"@FIXTURE@": _FIXTURE, "@MARK@": "@pytest.mark.anyio\n"} if asynchronous else {"@FIXTURE@": "", "@MARK@": ""}
    files = {f"{name}.py": _ENVIRONMENT, f"test_{name}.py": _TEST}
    for mark, text in marks.items():
        files = {file: content.replace(mark, text) for file, content in files.items()}
    tasks = [{"key": f"{name}-{seed}", "prompt": _PROMPT, "env_key": name, "seed": seed} for seed in range(40)]
    return files | {f"{name}_tasks.json": json.dumps({"tasks": tasks}, indent=1) + "\n"}


_PROMPT = "Guess my number between 0 and 9. Answer with one digit."

_ENVIRONMENT = '''"""The environment @CLASS@: a number is to be guessed, in five turns at most."""

import random
import re

from fleetbus import ChatMessage, Start, Step, Verdict

TURNS = 5


class @CLASS@:
    """One episode. Every call comes once the one before it has ended; `close` comes in every case."""

    replayable = True  # the same actions lead to the same observations: a lost episode continues elsewhere

    @ASYNC@ def open(self, task):
        """Acquire what the episode needs. An exception here or below ends it as ``env_failed``, which trains nothing."""
        self.task = task
        self.secret = random.Random(task.seed).randrange(10)
        self.guesses = []

    @ASYNC@ def reset(self):
        """The whole prompt that the policy sees."""
        return Start(messages=(ChatMessage(role="user", content=self.task.prompt),))

    @ASYNC@ def step(self, action):
        """One action of the policy: `action.text`, and `action.tool_calls` if it called tools."""
        digits = re.findall(r"[0-9]", action.text)
        if not digits:
            return Step(messages=(ChatMessage(role="user", content="Answer with one digit."),))
        guess = int(digits[-1])
        self.guesses.append(guess)
        if guess == self.secret:
            return Step(terminated=True)
        if len(self.guesses) == TURNS:
            return Step(truncated=True)
        hint = "higher" if guess < self.secret else "lower"
        return Step(messages=(ChatMessage(role="user", content=f"It is {hint} than {guess}."),))

    @ASYNC@ def state(self):
        """For people and monitors."""
        return {"guesses": self.guesses}

    @ASYNC@ def verify(self):
        """The grade of the episode; `reward=None` if there is none, which is not the same as 0."""
        won = bool(self.guesses) and self.guesses[-1] == self.secret
        return Verdict(reward=1.0 - 0.1 * (len(self.guesses) - 1) if won else 0.0)

    @ASYNC@ def close(self):
        """Release everything."""
'''

_TEST = '''"""@CLASS@, played by a script: `python -m pytest test_@NAME@.py`."""

import random

import pytest

from fleetbus import Action, Task

from @NAME@ import @CLASS@

TASK = Task(key="t", prompt="Guess.", seed=3)
SECRET = random.Random(3).randrange(10)


def says(text):
    return Action(episode_id="e", attempt=1, turn=0, text=text)

@FIXTURE@
@ASYNC@ def play(*texts):
    """What a worker does with an episode: the last step, and the verdict."""
    environment = @CLASS@()
    @AWAIT@ environment.open(TASK)
    try:
        start = @AWAIT@ environment.reset()
        assert start.messages[0].content == "Guess."
        steps = [@AWAIT@ environment.step(says(text)) for text in texts]
        return steps, @AWAIT@ environment.verify()
    finally:
        @AWAIT@ environment.close()


@MARK@@ASYNC@ def test_the_right_number_ends_the_episode_and_is_rewarded():
    steps, verdict = @AWAIT@ play(f"It is {SECRET}.")
    assert steps[-1].terminated and verdict.reward == 1.0


@MARK@@ASYNC@ def test_a_wrong_number_gets_a_hint():
    wrong = (SECRET + 1) % 10
    steps, verdict = @AWAIT@ play("hm", str(wrong), str(SECRET))
    assert steps[0].messages[0].content == "Answer with one digit."
    assert ("lower" if wrong > SECRET else "higher") in steps[1].messages[0].content
    assert verdict.reward == pytest.approx(0.9)


@MARK@@ASYNC@ def test_five_wrong_numbers_are_no_success():
    steps, verdict = @AWAIT@ play(*[str((SECRET + 1) % 10)] * 5)
    assert steps[-1].truncated and verdict.reward == 0.0
'''

_FIXTURE = """
@pytest.fixture
def anyio_backend():
    return "asyncio"

"""
