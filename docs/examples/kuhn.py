"""Two seats in one file: Kuhn poker, which a policy plays against itself.

Train on it: python kuhn.py (some minutes on two cores; a second call resumes the run, or returns at once if it has finished).
The settings stand in kuhn.toml, each with its reason.
"""

from pathlib import Path

import fleetbus

CARDS = "JQK"
DEALS = [first + second for first in CARDS for second in CARDS if first != second]
SEATS = ("first", "second")


def settle(deal: str, moves: str) -> int | None:
    """The chips that the first seat wins; None while the game goes on. Each move bets (or calls), ``b``, or passes, ``p``."""
    higher = 1 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1
    return {"pp": higher, "bb": 2 * higher, "pbb": 2 * higher, "bp": 1, "pbp": -1}.get(moves)


def read_move(text: str) -> str:
    """An answer with a vowel bets, any other passes: a policy that was never told of the game does both."""
    return "b" if any(letter in "aeiou" for letter in text.lower()) else "p"


class Kuhn:
    """One deal: each seat sees its own card and the moves."""

    replayable = True  # the same answers lead to the same observations

    async def open(self, task):
        self.deal, self.moves = task.key, ""

    async def reset(self):
        return fleetbus.Start(messages=(self.show(),), seat=SEATS[0])

    async def step(self, action):
        self.moves += read_move(action.text)
        if settle(self.deal, self.moves) is not None:
            return fleetbus.Step(terminated=True)
        return fleetbus.Step(messages=(self.show(),), seat=SEATS[len(self.moves) % 2])

    def show(self):
        """The prompt of a seat's first turn, or what it sees next."""
        return fleetbus.ChatMessage(role="user", content=f"{self.deal[len(self.moves) % 2]} {self.moves or '-'}")

    async def state(self):
        return {"deal": self.deal, "moves": self.moves}

    async def verify(self):
        won = settle(self.deal, self.moves)
        if won is None:
            return fleetbus.Verdict(reward=None, reason="the game has not ended")
        return fleetbus.Verdict(reward=float(won), seats={SEATS[0]: float(won), SEATS[1]: -float(won)})

    async def close(self):
        """Nothing to release."""


if __name__ == "__main__":
    summary = fleetbus.train(Kuhn, [fleetbus.Task(key=deal) for deal in DEALS], config=Path(__file__).with_name("kuhn.toml"))
    print("episodes", summary.episodes_trained)
