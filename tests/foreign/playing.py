"""Episodes of environments of other packages, played with given answers and without a bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from fleetbus.config.settings import Configuration, EnvironmentSettings, LimitSettings
from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.base import EnvironmentFailed, Verdict
from fleetbus_workers.environment.specs import build_environment_factory

AT_A_TIME = 4
MAX_TURNS = 60

Episodes = Sequence[tuple[int | str, list[Any]]]
"""The place of a task in the package's data, or its id there, and the answers."""


def act(turn: int, answer: Any) -> Action:
    if isinstance(answer, str):
        return Action(episode_id="e", attempt=1, turn=turn, text=answer)
    calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in answer)
    return Action(episode_id="e", attempt=1, turn=turn, text="", tool_calls=calls)


async def play(factory: Any, index: int | str, answers: list[Any], pad: Any, *, graded: bool = True) -> Verdict | None:
    environment = factory()
    try:
        await environment.open(Task(key=f"t{index}", prompt="", config={"id" if isinstance(index, str) else "index": index}))
        await environment.reset()
        for turn in range(MAX_TURNS):
            if (await environment.step(act(turn, answers[turn] if turn < len(answers) else pad))).terminated:
                break
        verdict: Verdict = await environment.verify()
        assert verdict.reward is not None or not graded
        return verdict
    except EnvironmentFailed as error:
        print(f"task {index} failed: {error}")
        return None
    finally:
        await environment.close()


async def play_all(spec: str, episodes: Episodes, *, pad: Any = "done") -> list[float | None]:
    """The rewards, None where an episode failed; each is answered with its answers, then with ``pad``."""
    verdicts = await play_to_verdicts(spec, episodes, pad=pad)
    return [None if verdict is None or verdict.reward is None else float(verdict.reward) for verdict in verdicts]


async def play_to_verdicts(spec: str, episodes: Episodes, *, pad: Any = "done", graded: bool = True) -> list[Verdict | None]:
    """The same with all that the verdicts say; with ``graded`` each has a reward."""
    settings = Configuration(environment=EnvironmentSettings(agent_isolation="auto"), limits=LimitSettings(reset=600))
    factory: Any = build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]
    verdicts: list[Verdict | None] = [None] * len(episodes)
    gate = anyio.CapacityLimiter(AT_A_TIME)

    async def play_one(number: int) -> None:
        async with gate:
            verdicts[number] = await play(factory, *episodes[number], pad, graded=graded)

    async with factory.run(), anyio.create_task_group() as group:
        for number in range(len(episodes)):
            group.start_soon(play_one, number)
    return verdicts
