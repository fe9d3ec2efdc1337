"""Two games of the package `verifiers`, 200 of each as it paid them, in environments of one's own with the same rules."""

from __future__ import annotations

import pytest

from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.base import EnvironmentFailed
from tests.foreign.recorded_games import GAMES, Game, load_games
from tests.support.games_of_verifiers import SOLVERS, Kuhn, ProposerSolver

OWN: dict[str, type[Kuhn] | type[ProposerSolver]] = {"kuhn_poker": Kuhn, "proposer_solver": ProposerSolver}
ROLES = {"kuhn_poker": ("player0", "player1"), "proposer_solver": ("proposer", "solver")}


async def play(name: str, game: Game) -> dict[str, float | None] | None:
    """The rewards by role; None where the environment fails. Every recorded answer is taken, and no more than these."""
    environment = OWN[name]()
    await environment.open(Task(key="t", config={"index": game.place}))
    await environment.reset()
    ends = []
    for turn, answer in enumerate(game.answers):
        try:
            ends.append((await environment.step(Action(episode_id="e", attempt=1, turn=turn, text=answer))).terminated)
        except EnvironmentFailed:
            assert turn == len(game.answers) - 1
            return None
    assert ends == [False] * (len(ends) - 1) + [True]
    seats = dict((await environment.verify()).seats)
    if name == "proposer_solver":
        seats["solver"] = sum(seats.pop(solver) or 0.0 for solver in SOLVERS) / len(SOLVERS)
    return seats


@pytest.mark.parametrize("name", OWN)
async def test_each_seat_is_paid_as_the_package_paid_it(name: str) -> None:
    games = load_games(name)
    assert [await play(name, game) for game in games] == [game.rewards for game in games]
    assert len(games) == GAMES
    paid = [game.rewards for game in games if game.rewards is not None]
    assert all(len({rewards[role] for rewards in paid}) > 1 for role in ROLES[name]), "games differ in what each is worth"
