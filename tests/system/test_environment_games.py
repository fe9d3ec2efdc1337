"""Games of PettingZoo and OpenSpiel: rewards as their packages pay them, seats, takeovers and wrong answers."""

from __future__ import annotations

import importlib
import itertools
import random
from pathlib import Path
from typing import Any

import anyio
import pytest

from docs.examples.kuhn import settle
from fleetbus.errors import UserError
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.common.legal_moves import find_move
from fleetbus_workers.environment.base import Environment, EnvironmentFailed, Start, Step
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.called_command import call
from tests.support.interrupted_deployment import PATIENT
from tests.support.small_deployment import build_configuration, small_deployment

pytestmark = pytest.mark.filterwarnings("ignore")

GAMES = 200
ZOO = (
    "classic/tictactoe_v3",
    "classic/connect_four_v3",
    "classic/leduc_holdem_v4",
    "classic/texas_holdem_v4",
    "classic/rps_v2",
)
SPIEL = ("kuhn_poker", "leduc_poker", "tic_tac_toe", "kuhn_poker(players=3)", "matrix_rps", "oshi_zumo(horizon=5)")


def make(spec: str) -> Environment:
    if spec.startswith("pettingzoo"):
        pytest.importorskip("pettingzoo")
        pytest.importorskip("pygame")
        pytest.importorskip("rlcard")
    else:
        pytest.importorskip("pyspiel")
    return build_environment_factory(spec, verifier=None)()  # type: ignore[arg-type]


async def begin(environment: Environment, seed: int = 1, **task: Any) -> Start:
    await environment.open(Task(key="t", seed=seed, **task))
    return await environment.reset()


async def act(environment: Environment, text: object) -> Step:
    return await environment.step(Action(episode_id="e", attempt=1, turn=0, text=str(text)))


async def play(environment: Environment, seed: int) -> tuple[list[int], list[Start | Step]]:
    """A game of random legal moves, and what was shown."""
    chance = random.Random(seed)
    shown: list[Start | Step] = [await begin(environment, seed)]
    moves: list[int] = []
    while not moves or not (shown[-1].terminated or shown[-1].truncated):  # type: ignore[union-attr]
        moves.append(chance.choice(list(environment._legal[environment._rounds.player])))  # type: ignore[attr-defined]
        shown.append(await act(environment, moves[-1]))
    return moves, shown


@pytest.mark.parametrize("id", ZOO)
async def test_each_seat_is_worth_what_pettingzoo_pays_its_agent(id: str) -> None:
    factory: Any = make(f"pettingzoo:{id}").__class__
    module = importlib.import_module(f"pettingzoo.{id.replace('/', '.')}")
    paid = set()
    for seed in range(GAMES):
        environment = factory(id)
        moves, shown = await play(environment, seed)
        seats = [step.seat for step in shown[:-1]]
        verdict = await environment.verify()
        await environment.close()
        original = module.env()
        original.reset(seed=seed)
        rewards = dict.fromkeys(original.possible_agents, 0.0)
        recorded, acted = iter(moves), []
        for agent in original.agent_iter():
            _, reward, terminated, truncated, _ = original.last()
            rewards[agent] += reward
            acted += [] if terminated or truncated else [agent]
            original.step(None if terminated or truncated else next(recorded))
        assert (verdict.seats, seats, next(recorded, None)) == (rewards, acted, None)
        paid.add(tuple(verdict.seats.values()))
    assert len(paid) > 1


async def test_a_parallel_environment_pays_what_its_own_interface_does_and_shows_no_move_of_the_same_step() -> None:
    factory: Any = make("pettingzoo:classic/rps_v2").__class__
    from pettingzoo.classic import rps_v2

    for seed in range(GAMES):
        environment = factory("classic/rps_v2")
        moves, shown = await play(environment, seed)
        original = rps_v2.parallel_env()
        original.reset(seed=seed)
        rewards = dict.fromkeys(original.possible_agents, 0.0)
        for joint in zip(moves[::2], moves[1::2], strict=True):
            _, paid, *_ = original.step(dict(zip(original.possible_agents, joint, strict=True)))
            rewards = {agent: rewards[agent] + paid[agent] for agent in rewards}
        assert (await environment.verify()).seats == rewards
        assert "\n3\n" in str(shown[1].messages[0].content), "the second has seen no move of the first"
        assert shown[-1].truncated is True  # type: ignore[union-attr]


async def test_what_an_agent_is_rewarded_with_while_others_move_in_its_round_is_its_own() -> None:
    environment: Any = make("pettingzoo:sisl/pursuit_v5")
    from pettingzoo.sisl import pursuit_v5

    arguments = {"n_pursuers": 3, "max_cycles": 5}
    original = pursuit_v5.parallel_env(**arguments)
    original.reset(seed=7)
    paid = dict.fromkeys(original.possible_agents, 0.0)
    while original.agents:
        for agent, reward in original.step(dict.fromkeys(original.agents, 0))[1].items():
            paid[agent] += float(reward)
    step: Start | Step = await begin(environment, 7, config={"kwargs": arguments})
    while not (isinstance(step, Step) and (step.terminated or step.truncated)):
        step = await act(environment, 0)
    assert (await environment.verify()).seats == pytest.approx(paid, abs=1e-9)
    assert min(paid.values()) < 0


@pytest.mark.parametrize("id", SPIEL)
async def test_each_seat_is_worth_what_openspiel_returns(id: str) -> None:
    factory: Any = make(f"openspiel:{id}").__class__
    import pyspiel

    paid = set()
    for seed in range(GAMES):
        environment = factory(id)
        moves, _ = await play(environment, seed)
        verdict, chance = await environment.verify(), random.Random(seed)
        state, recorded = pyspiel.load_game(id).new_initial_state(), iter(moves)
        while not state.is_terminal():
            if state.is_chance_node():
                outcomes, weights = zip(*state.chance_outcomes(), strict=True)
                state.apply_action(chance.choices(outcomes, weights)[0])
            elif state.is_simultaneous_node():
                state.apply_actions([next(recorded) for _ in range(state.num_players())])
            else:
                state.apply_action(next(recorded))
        assert list(verdict.seats.values()) == state.returns()
        assert next(recorded, None) is None
        paid.add(tuple(state.returns()))
        if id == "kuhn_poker":
            first, second, *bets = state.history()
            assert settle("JQK"[first] + "JQK"[second], "".join("pb"[bet] for bet in bets)) == verdict.seats["player_0"]
    assert len(paid) > 1


@pytest.mark.parametrize("spec", [f"pettingzoo:{id}" for id in ZOO] + [f"openspiel:{id}" for id in SPIEL])
async def test_whoever_takes_over_at_any_step_plays_the_same_game(spec: str) -> None:
    moves, shown = await play(make(spec), 7)
    for taken in range(len(moves) + 1):
        other = make(spec)
        again: list[Start | Step] = [await begin(other, 7)]
        again += [await act(other, move) for move in moves[:taken]]
        assert again == shown[: taken + 1]


@pytest.mark.parametrize(
    ("spec", "least"),
    [("pettingzoo:classic/tictactoe_v3", -1.0), ("openspiel:kuhn_poker", -2.0), ("openspiel:tic_tac_toe", -1.0)],
)
async def test_a_seat_that_names_no_legal_move_has_lost_after_three_answers(spec: str, least: float) -> None:
    environment = make(spec)
    start = await begin(environment)
    assert (await environment.verify()).reward is None
    wrong = [await act(environment, text) for text in ("no", "99")]
    assert [step.seat for step in wrong] == ["", ""]
    assert "'99' is no legal move; 1 more and you lose. Answer with one legal move: 0" in str(wrong[1].messages[0].content)
    assert (await act(environment, "-1")).terminated
    verdict = await environment.verify()
    assert verdict.seats == {start.seat: least, **{seat: 0.0 for seat in verdict.seats if seat != start.seat}}
    assert "gave 3 answers that are no legal move" in verdict.reason


async def test_moves_are_said_by_name_or_number_and_each_player_sees_its_own_cards() -> None:
    environment = make("openspiel:kuhn_poker")
    start = await begin(environment, prompt="Win chips.")
    shown = str(start.messages[0].content)
    assert shown.startswith("Win chips.\n\nKuhn Poker. You are player 0.\n\n")
    assert shown.endswith("Answer with one legal move: 0 (Pass), 1 (Bet).")
    step = await act(environment, "I think so.</think><action> bet. </action>")
    card = shown.split("\n\n")[2], str(step.messages[0].content).split("\n\n")[2]
    assert step.seat == "player_1" and card[0] != card[1] and card[1].endswith("b")
    zoo = make("pettingzoo:classic/rps_v2")
    assert "0 (rock), 1 (paper), 2 (scissors)" in str((await begin(zoo)).messages[0].content)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pettingzoo:classic/chess_v99", "PettingZoo has no environment|PettingZoo: "),
        ("pettingzoo:tictactoe", "is not written as FAMILY/NAME"),
        ("pettingzoo:classic/nothing_v1", "PettingZoo has no environment|PettingZoo: "),
        ("openspiel:nothing", "OpenSpiel has no game 'nothing'"),
        ("openspiel:kuhn_poker(players=x)", "Wrong type for parameter players|parameters of a game are numbers"),
        ("openspiel:mfg_garnet", "mean field"),
    ],
)
async def test_a_bad_name_is_refused_in_one_line(spec: str, message: str) -> None:
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pyspiel")
    with pytest.raises(UserError, match=message) as refused:
        make(spec)
    assert "\n" not in str(refused.value) and spec in str(refused.value)
    with pytest.raises(EnvironmentFailed, match=message):
        await begin(make(spec.replace(":", "_").partition("_")[0]), config={"id": spec.partition(":")[2]})


async def test_more_agents_than_an_episode_has_seats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for adapter in ("pettingzoo", "openspiel"):
        make(f"{adapter}:{'classic/rps_v2' if adapter == 'pettingzoo' else 'kuhn_poker'}")
        monkeypatch.setattr(f"fleetbus_workers.environment.adapters.{adapter}.MAX_SEATS", 1)
    for spec in ("pettingzoo:classic/rps_v2", "openspiel:kuhn_poker"):
        with pytest.raises(UserError, match=r"has 2 (agents|players); an episode has at most 1 seats"):
            make(spec)


@pytest.mark.integration
@pytest.mark.parametrize("spec", ["pettingzoo:classic/rps_v2", "openspiel:matrix_rps"])
async def test_the_turns_of_those_who_move_at_once_are_sent_side_by_side(spec: str) -> None:
    """Also of those who are asked again for what was no legal move, as all of the rule policy's answers are."""
    make(spec)
    factory = build_environment_factory(spec, verifier=None)  # type: ignore[arg-type]
    async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
        await fleet.heard(fleet.environment("e1", make=factory), fleet.inference("i1"))
        with anyio.fail_after(60):
            for number in itertools.count():
                await fleet.request(f"e{number}", task=Task(key="t", seed=1))
                result = await fleet.result(f"e{number}")
                if any(each.ahead for each in await fleet.observations()):  # the environment worker has heard of the engine
                    break
        asked = [each for each in await fleet.observations() if each.episode_id == result.episode_id]
    assert (result.outcome, result.turns) == ("completed", 5)
    seats = {each.turn: each.seat for each in asked}
    assert [seats[turn] for turn in range(5)] == ["player_0", "player_1"] * 2 + ["player_0"], seats
    assert result.seats


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_game_is_trained_by_self_play_with_one_command(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    small = ("--learner-groups", "1", "--learner-group-size", "4", "--evaluation-episodes", "0", "--no-monitor")
    (tmp_path / "tasks.json").write_text('[{"key": "a", "prompt": ""}, {"key": "b", "prompt": ""}]')
    shown = call(tmp_path, "up", "--environment", "openspiel:kuhn_poker", "--tasks", "tasks.json", "--steps", "2", *small)
    assert "step 2/2" in shown
    assert "balances" in call(tmp_path, "audit", "default")


@pytest.mark.parametrize(
    "id", ["efg_game(filename=secrets.env)", "misere(game=efg_game(filename=secrets.env))", "kuhn_poker(players=x)"]
)
async def test_a_task_gives_a_game_numbers_alone(id: str) -> None:
    with pytest.raises(EnvironmentFailed, match="are numbers, true or false"):
        await make("openspiel").open(Task(key="a", config={"id": id}))
    await make("openspiel").open(Task(key="a", config={"id": "kuhn_poker(players=3)"}))


def test_a_move_whose_name_differs_from_anothers_by_case_alone_is_the_one_that_is_named() -> None:
    moves = {701: "bxc3", 1882: "Bxc3", 7: "O-O"}
    assert [find_move(text, moves) for text in ("Bxc3", "bxc3", "BXC3", "o-o", "7")] == [1882, 701, None, 7, 7]
