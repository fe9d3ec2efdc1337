"""Two games of the package `verifiers`, by the same rules, as environments of one's own: Kuhn poker with its moves in brackets,
and problems that a proposer sets, with a seat per solver."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from docs.examples.kuhn import CARDS, settle
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict

PLAYERS = ("player0", "player1")
TRIES = 2
SOLVERS = ("solver0", "solver1")


def ask(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=text),)


class Kuhn:
    """The deal is drawn by the task's index. A player who twice names not exactly one legal move loses the ante."""

    async def open(self, task: Task) -> None:
        self.deal = "".join(random.Random(task.config["index"]).sample(list(CARDS), 2))
        self.moves, self.wrong, self.loser = "", 0, -1

    async def reset(self) -> Start:
        return Start(messages=ask(f"Your card: {self.deal[0]}."), seat=PLAYERS[0])

    async def step(self, action: Action) -> Step:
        legal = ("fold", "call") if "b" in self.moves else ("check", "bet")
        named = [move for move in re.findall(r"\[(\w+)\]", action.text.lower()) if move in legal]
        if len(named) != 1:
            self.wrong += 1
            if self.wrong == TRIES:
                self.loser = len(self.moves) % 2
            return Step(messages=ask("That was not a legal move."), terminated=self.wrong == TRIES)
        self.moves, self.wrong = self.moves + "pb"[named[0] in ("bet", "call")], 0
        player = len(self.moves) % 2
        if settle(self.deal, self.moves) is not None:
            return Step(terminated=True)
        return Step(messages=ask(f"Your card: {self.deal[player]}. So far: {self.moves}."), seat=PLAYERS[player])

    async def verify(self) -> Verdict:
        won = settle(self.deal, self.moves) if self.loser < 0 else 2 * self.loser - 1
        assert won is not None, "the game has ended"
        return Verdict(reward=float(won), seats=dict(zip(PLAYERS, (float(won), float(-won)), strict=True)))

    async def state(self) -> dict[str, Any]:
        return {"deal": self.deal, "moves": self.moves}

    async def close(self) -> None: ...


class ProposerSolver:
    """A problem with its answer, which each solver tries; the proposer is worth most if half of them find it."""

    async def open(self, task: Task) -> None:
        self.problem: tuple[str, str] | None = None
        self.found: list[float] = []

    async def reset(self) -> Start:
        return Start(messages=ask("Invent a problem."), seat="proposer")

    async def step(self, action: Action) -> Step:
        if self.problem is None:
            self.problem = read_problem(action.text)
        else:
            numbers = re.findall(r"-?\d+", action.text.replace(",", ""))
            self.found.append(float(numbers[-1:] == [self.problem[1]]))
        if len(self.found) == len(SOLVERS):
            return Step(terminated=True)
        return Step(messages=ask(self.problem[0]), seat=SOLVERS[len(self.found)])

    async def verify(self) -> Verdict:
        rate = sum(self.found) / len(self.found)
        proposer = 4 * rate * (1 - rate)
        return Verdict(reward=proposer, seats={"proposer": proposer, **dict(zip(SOLVERS, self.found, strict=True))})

    async def state(self) -> dict[str, Any]:
        return {"found": self.found}

    async def close(self) -> None: ...


def read_problem(text: str) -> tuple[str, str]:
    """The problem and its answer from the last line that has them, or from what is in braces. Raises `EnvironmentFailed`."""
    braces = re.search(r"\{.*\}", text, re.DOTALL)
    for chunk in [*(line.strip() for line in reversed(text.splitlines())), braces.group() if braces else ""]:
        if not (chunk.startswith("{") and chunk.endswith("}")):
            continue
        try:
            read = read_json(chunk)
        except json.JSONDecodeError:
            continue
        if isinstance(read, dict) and {"problem", "answer"} <= read.keys():
            if type(read["answer"]) is not int:
                raise EnvironmentFailed("the answer is no integer")
            return str(read["problem"]), str(read["answer"])
    raise EnvironmentFailed("there is no problem")


def read_json(text: str) -> Any:
    """JSON, in which LaTeX may stand with single backslashes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(re.sub(r'\\(?:["\\/]|u[0-9a-fA-F]{4})|\\', lambda found: found[0] if found[0][1:] else r"\\", text))
