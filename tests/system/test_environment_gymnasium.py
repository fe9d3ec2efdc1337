"""Gymnasium environments and the two text collections: what the policy sees, which actions it has, how an episode ends."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any, cast

import anyio
import gymnasium
import numpy as np
import pytest
from PIL import Image as Pillow

from fleetbus.errors import UserError
from fleetbus_schemas import Action, Image, Task
from fleetbus_workers.environment.adapters.gymnasium.environment import GymnasiumEnvironment
from fleetbus_workers.environment.adapters.gymnasium.text import (
    UnknownAction,
    is_of_text,
    list_action_names,
    parse_action,
    strip_ansi_codes,
)
from fleetbus_workers.environment.base import Environment, EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import EncodedImage
from fleetbus_workers.environment.specs import build_environment_factory

STILL = {"kwargs": {"is_slippery": False}}


def make(spec: str) -> Environment:
    return build_environment_factory(spec, verifier=None)()  # type: ignore[arg-type]


async def begin(environment: Environment, **task: Any) -> Start:
    await environment.open(Task(**{"key": "t", "seed": 1, **task}))
    return await environment.reset()


async def act(environment: Environment, *texts: str) -> list[Step]:
    return [await environment.step(Action(episode_id="e", attempt=1, turn=0, text=text)) for text in texts]


async def test_a_grid_is_walked_by_words_and_the_goal_is_the_end() -> None:
    environment = make("gym:FrozenLake-v1")
    start = await begin(environment, prompt="Reach G.", config=STILL)
    (message,) = start.messages
    assert message.content == (
        "Reach G.\n\nYou are at the letter in brackets. S: start, F: frozen, H: hole, G: goal.\n\n"
        "Answer with one action: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    steps = await act(environment, "down", "<think>hm</think><action> 1 </action>", "Right.", "down", "right", "right")
    assert "SFFF\n[F]HFH" in str(steps[0].messages[0].content)
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert str(steps[-1].messages[0].content).endswith("HFF[G]")
    assert steps[-1].truncated is False
    assert await environment.verify() == Verdict(reward=1.0)
    assert await environment.state() == {"id": "FrozenLake-v1", "steps": 6}
    await environment.close()


async def test_an_unknown_action_costs_a_turn_and_moves_nothing() -> None:
    environment = make("gym:FrozenLake-v1")
    await begin(environment, config=STILL)
    (step,) = await act(environment, "fly")
    assert step.messages[0].content == "Unknown action 'fly'. The actions are: left, down, right, up."
    assert (step.tool_errors, step.terminated, step.truncated) == (1, False, False)
    assert await environment.verify() == Verdict(reward=0.0)
    await environment.close()


async def test_running_out_of_steps_is_truncation_and_not_the_end() -> None:
    environment = make("gym")
    await begin(environment, config={"id": "CliffWalking-v1", "kwargs": {"max_episode_steps": 2}})
    steps = await act(environment, "up", "up")
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]
    assert await environment.verify() == Verdict(reward=-2.0)
    await environment.close()


async def test_the_taxi_s_marks_survive_without_colours() -> None:
    environment = make("gym:Taxi-v4")
    text = str((await begin(environment)).messages[0].content)
    assert "south, north, east, west, pickup, dropoff" in text
    assert "\x1b" not in text
    assert "[ ]" in text
    assert "(" in text.partition("+---")[2]
    assert "{" in text.partition("+---")[2]
    await environment.close()


async def test_the_same_seed_and_actions_give_the_same_episode() -> None:
    seen = []
    for _ in range(2):
        environment = make("gym:FrozenLake-v1")
        assert environment.replayable
        start = await begin(environment, seed=None)
        seen.append((start, await act(environment, "right", "right")))
        await environment.close()
    assert seen[0] == seen[1]


async def test_frames_are_images_when_asked_for() -> None:
    kept: list[EncodedImage] = []

    async def store_image(picture: EncodedImage) -> Image:
        kept.append(picture)
        return Image(object=f"hash-{len(kept)}")

    pytest.importorskip("pygame")
    environment = GymnasiumEnvironment("FrozenLake-v1", store_image=store_image)
    start = await begin(environment, config={**STILL, "frames": True})
    _, image = start.messages[0].content
    assert image == Image(object="hash-1", width=256, height=256)
    (step,) = await act(environment, "down")
    assert [type(part) for part in step.messages[0].content] == [Image]
    with Pillow.open(io.BytesIO(kept[1].data)) as picture:
        assert (picture.mode, picture.size) == ("RGB", (256, 256))
    await environment.close()
    with pytest.raises(EnvironmentFailed, match="renders no frames"):
        await begin(GymnasiumEnvironment("fleetbus-Counting-v0"), config={"frames": True})


class Counting(gymnasium.Env[Any, Any]):
    """Shows what was asked of it; hangs until it is let go at 9."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    hanging, release, gone = threading.Event(), threading.Event(), threading.Event()
    closed = 0

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if action[0] == 9:
            self.hanging.set()
            self.release.wait(30)
        return action, np.float32(0.5), np.bool_(False), False, {}

    def close(self) -> None:
        type(self).closed += 1
        if self.release.is_set():
            self.gone.set()


gymnasium.register("fleetbus-Counting-v0", entry_point=Counting, disable_env_checker=True)  # type: ignore[arg-type]


async def test_other_action_spaces_are_spoken_in_json() -> None:
    environment = make("gym:fleetbus-Counting-v0")
    start = await begin(environment)
    assert "as JSON for Box(" in str(start.messages[0].content)
    steps = await act(environment, "[1, 2.5]", "[1, 20]", "one", "[1")
    assert steps[0].messages[0].content == "[1.0, 2.5]"
    assert steps[0].reward == 0.5
    assert [step.tool_errors for step in steps] == [0, 1, 1, 1]
    await environment.close()


class Nested(Counting):
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Dict(
        {
            "move": gymnasium.spaces.Box(-1, 1, (2,), np.float32),
            "fire": gymnasium.spaces.Discrete(2),
            "route": gymnasium.spaces.Sequence(
                gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3), gymnasium.spaces.Text(3)))
            ),
        }
    )


def test_an_action_of_nested_spaces_is_made_of_arrays_and_tuples() -> None:
    action = parse_action('{"move": [0, 0.5], "fire": 1, "route": [[2, "abc"]]}', Nested(), ())
    assert isinstance(action, dict)
    assert (action["move"].dtype, action["move"].tolist()) == (np.float32, [0, 0.5])
    assert (action["fire"], action["route"]) == (1, ((2, "abc"),))


def test_an_action_of_one_of_several_spaces_or_of_stacked_ones_is_played() -> None:
    box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    environment = Nested()
    environment.action_space = gymnasium.spaces.OneOf((gymnasium.spaces.Discrete(3), box))
    index, chosen = cast("tuple[int, Any]", parse_action("[1, [0, 0.5]]", environment, ()))
    assert (index, chosen.dtype, chosen.tolist()) == (1, np.float32, [0, 0.5])
    for text in ("[2, 0]", "[-1, [0, 0]]", "[0, 3]", "[0]"):
        with pytest.raises(UnknownAction):
            parse_action(text, environment, ())
    environment.action_space = gymnasium.spaces.Sequence(box, stack=True)
    assert cast("Any", parse_action("[[0, 0.5]]", environment, ())).tolist() == [[0, 0.5]]


@pytest.mark.parametrize(
    "text",
    ["[]", "1", '{"move": [0, 0.5]}', '{"move": [0, 2], "fire": 1, "route": []}', '{"move": "up", "fire": 1, "route": []}'],
)
def test_what_is_no_action_of_nested_spaces_is_refused(text: str) -> None:
    with pytest.raises(UnknownAction):
        parse_action(text, Nested(), ())


async def test_a_step_that_hangs_is_left_behind_when_its_time_is_up() -> None:
    environment = make("gym:fleetbus-Counting-v0")
    await begin(environment)
    closed = Counting.closed
    try:
        with anyio.fail_after(50):
            async with anyio.create_task_group() as group:
                group.start_soon(act, environment, "[9, 9]")
                await anyio.to_thread.run_sync(Counting.hanging.wait)
                group.cancel_scope.cancel()
            with pytest.raises(EnvironmentFailed, match="still runs"):
                await act(environment, "[1, 1]")
            await environment.close()
        assert Counting.closed == closed, "nothing touches an environment that still computes"
    finally:
        Counting.release.set()
    await anyio.to_thread.run_sync(Counting.gone.wait, 20)
    assert Counting.closed == closed + 1, "its own thread closes it in the end"


async def test_names_come_from_the_task_first_and_must_fit() -> None:
    lake = gymnasium.make("FrozenLake-v1")
    assert list_action_names(lake, ["w", "s", "e", "n"]) == ("w", "s", "e", "n")
    with pytest.raises(ValueError, match="2 names were given for 4 actions"):
        list_action_names(lake, ["a", "b"])
    assert parse_action("UP", lake, list_action_names(lake)) == parse_action("3", lake, list_action_names(lake)) == 3
    with pytest.raises(UnknownAction):
        parse_action("", lake, list_action_names(lake))
    assert strip_ansi_codes("\x1b[41mS\x1b[0m\x1b[35mR\x1b[0m\x1b[34;1mB\x1b[0m\x1b[0m") == "[S]{R}(B)"
    lake.close()


class Words(gymnasium.Space[str]):
    """As packages have them that know no longest text."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class Moves(gymnasium.Space[Any]):
    """Looks into an action before it knows what it is."""

    def contains(self, x: Any) -> bool:
        return x["move"] in ("left", "right")


class Echo(gymnasium.Env[object, Any]):
    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(1)

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self.action_space = action_space


@pytest.mark.parametrize("space", [Words(), gymnasium.spaces.Text(30, charset="clicker('12)7 ")])
def test_where_an_action_is_a_text_what_was_said_is_the_action(space: gymnasium.Space[Any]) -> None:
    environment = Echo(space)
    said = ["click('12')", '"click"', "12", "7"]
    assert [parse_action(text, environment, ()) for text in said] == ["click('12')", "click", "12", "7"]
    assert is_of_text(space)
    assert not is_of_text(gymnasium.spaces.Box(0, 1)) and not is_of_text(gymnasium.spaces.Dict())


def test_a_space_that_fails_at_a_text_holds_none() -> None:
    """It was asked at the beginning of each episode, which failed."""
    assert not is_of_text(Moves())


def test_a_text_that_its_space_does_not_hold_is_no_action() -> None:
    with pytest.raises(UnknownAction):
        parse_action("push", Echo(gymnasium.spaces.Text(30, charset="clicker")), ())


@pytest.mark.parametrize("spec", ["gym:NoSuchThing-v0", "gym:FrozenLake-v99"])
def test_an_id_that_nobody_registered_is_refused_before_the_start(spec: str) -> None:
    with pytest.raises(UserError) as caught:
        build_environment_factory(spec, verifier=None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


POND = """
import gymnasium

class Pond(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return 0, {}

    def step(self, action):
        self.at += int(action)
        return self.at, float(self.at == 2), self.at == 2, False, {}

gymnasium.register(id="Pond-v0", entry_point=Pond)
"""


async def test_a_class_in_a_file_that_registers_it_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pond_of_a_test.py").write_text(POND)
    monkeypatch.chdir(tmp_path)
    for name in ("pond_of_a_test.py", "pond_of_a_test"):
        environment = make(f"gym:{name}:Pond-v0")
        await begin(environment)
        assert [step.terminated for step in await act(environment, "1", "0", "1")] == [False, False, True]
        assert await environment.verify() == Verdict(reward=1.0)
        await environment.close()
        del gymnasium.registry["Pond-v0"]
    with pytest.raises(UserError, match=r"register it with Gymnasium, and write gym:FILE\.py:ID"):
        make("pond_of_a_test:Pond")


async def test_a_task_without_an_id_is_told_so() -> None:
    with pytest.raises(EnvironmentFailed, match="names no environment"):
        await begin(make("gym"))


@pytest.mark.filterwarnings("ignore")
async def test_minigrid_is_shown_as_its_grid_and_mission() -> None:
    pytest.importorskip("minigrid")
    environment = make("gym:MiniGrid-Empty-5x5-v0")
    start = str((await begin(environment)).messages[0].content)
    assert "left, right, forward, pickup, drop, toggle, done" in start
    assert "Mission: get to the green goal square" in start
    steps = await act(environment, "forward", "forward", "right", "forward", "forward")
    assert [step.terminated for step in steps] == [False] * 4 + [True]
    assert (await environment.verify()).reward > 0.5  # type: ignore[operator]
    await environment.close()


@pytest.mark.filterwarnings("ignore")
async def test_a_reasoning_question_is_answered_once_and_scored_by_its_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    for text, reward in (("<answer>256</answer>", 1.0), ("no idea", 0.0)):
        environment = make("reasoning-gym:leg_counting")
        start = await begin(environment, seed=3)
        assert "how many legs" in str(start.messages[0].content)
        (step,) = await act(environment, text)
        assert (step.terminated, step.reward) == (True, reward)
        assert await environment.verify() == Verdict(reward=reward)
        assert (await environment.state())["dataset"] == "leg_counting"
        await environment.close()
    with pytest.raises(UserError, match="no dataset 'no_such'"):
        make("reasoning-gym:no_such")


@pytest.mark.filterwarnings("ignore")
async def test_a_text_game_is_played_to_its_end() -> None:
    pytest.importorskip("textarena")
    environment = make("textarena:GuessTheNumber-v0")
    start = await begin(environment, seed=3)
    assert "between 1 and 20" in str(start.messages[0].content)
    assert (await environment.verify()).reward is None
    environment = make("textarena:GuessTheNumber-v0")
    await begin(environment, seed=3)
    for number in range(1, 21):
        (step,) = await act(environment, f"[{number}]")
        if step.terminated:
            break
        assert "between 1 and 20" not in str(step.messages[0].content), "only what is new is said"
    assert (await environment.verify()).reward is not None
    assert await environment.state() == {"over": True}
    await environment.close()
    with pytest.raises(UserError, match="no game 'Chess-v99'"):
        make("textarena:Chess-v99")


@pytest.mark.filterwarnings("ignore")
async def test_each_player_of_a_text_game_is_a_seat_with_its_own_view_and_reward() -> None:
    pytest.importorskip("textarena")
    environment = make("textarena:TicTacToe-v0")
    shown: list[Start | Step] = [await begin(environment, seed=3, config={"players": 2})]
    for square in (4, 0, 2, 1, 6):  # the first player's diagonal
        (step,) = await act(environment, f"[{square}]")
        shown += [] if step.terminated else [step]
    assert [each.seat for each in shown] == [f"player-{turn % 2}" for turn in range(5)]
    assert ["You are Player" in str(each.messages[0].content) for each in shown] == [True, True, False, False, False]
    verdict = await environment.verify()
    assert (verdict.reward, verdict.seats) == (1.0, {"player-0": 1.0, "player-1": -1.0})
    with pytest.raises(EnvironmentFailed, match=r"has to be 2, received 1 \(config\.players of the task\)"):
        await begin(make("textarena:TicTacToe-v0"), seed=3)
    with pytest.raises(EnvironmentFailed, match=r"config\.players must be"):
        await begin(make("textarena:TicTacToe-v0"), seed=3, config={"players": "2"})
