"""Rollouts for a trainer of one's own, on virtual time: groups with tokens, back-pressure, failures told apart from rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import anyio
import msgspec
import pytest

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import Bus, LogState
from fleetbus.client.rollouts import rollouts
from fleetbus.client.sessions import SessionFailed, sessions
from fleetbus.config.settings import EnvironmentSettings, NatsSettings, RunSettings
from fleetbus.delivery.log_room import FILL_SHARE, UNMEASURED_BYTES
from fleetbus.errors import RequestUnanswered
from fleetbus_schemas import Action, ContextChange, EpisodeFinished, SessionAnswer, Task
from fleetbus_schemas.tokens import unpack_ids
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, Step
from fleetbus_workers.environment.episode import result, runner
from fleetbus_workers.learner.batches import CreditPlan, build_sequence
from fleetbus_workers.learner.leaves import list_leaves, split_sequence
from tests.support.small_deployment import LANES, LIMITS, RUN, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

TASKS = [Task(key=f"t{number}", prompt=f"play {number}") for number in range(6)]

anyio_backend = virtual_time


class FailsSometimes(ScriptedEnvironment):
    """The second episode of all fails in its first step."""

    episodes = 0

    async def step(self, action: Action) -> Step:
        if action.turn == 0:
            type(self).episodes += 1
            if type(self).episodes == 2:
                raise EnvironmentFailed("gone")
        return await super().step(action)


async def test_every_task_comes_back_as_a_group_with_tokens_masks_and_logprobs() -> None:
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, TASKS, group_size=3) as produced:
                groups = [group async for group in produced]
            assert sorted(group.task.key for group in groups) == [task.key for task in TASKS]
            for group in groups:
                assert len(group.graded) == 3
                for episode in group.episodes:
                    assert len(episode.ids) == len(episode.loss_mask) == len(episode.logprobs) > 0
                    assert not any(episode.loss_mask[: episode.prompt_tokens])
                    assert episode.loss_mask[episode.prompt_tokens]
                    assert all(own or value == 0.0 for own, value in zip(episode.loss_mask, episode.logprobs, strict=True))
                    assert (episode.reward, len(episode.texts)) == (1.0, 3)
            assert (await audit_run(fleet.bus, fleet.subjects)).balanced


class Summoning(ScriptedEnvironment):
    """After its first turn a sub-agent takes two, then the first segment goes on."""

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        change = {1: ContextChange(reason="sub_agent"), 3: ContextChange(resume=0), 4: ContextChange(keep_turns=1)}
        return msgspec.structs.replace(step, context=change.get(self._played))


async def test_an_episode_of_several_segments_comes_with_all_its_leaves_and_each_token_once() -> None:
    task = Task(key="t", prompt="play", config={"turns": 5})
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1", make=Summoning)
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, [task], group_size=2) as produced:
                (group,) = [group async for group in produced]
            results = {episode.episode_id: await fleet.result(episode.episode_id) for episode in group.graded}
            actions = await fleet.actions()
    assert len(results) == 2
    for episode in group.graded:
        assert (episode.reward, len(episode.texts)) == (1.0, 5)
        sequences = read_leaves(results[episode.episode_id], actions)
        assert [(one.segment, one.ids, one.loss_mask, one.logprobs) for one in episode.sequences] == sequences
        assert [one.segment for one in episode.sequences] == [0, 1, 2]
        sampled = [id_ for action in actions if action.episode_id == episode.episode_id for id_ in unpack_ids(action.sampled)]
        trained = [id_ for one in episode.sequences for id_, own in zip(one.ids, one.loss_mask, strict=True) if own]
        assert sorted(trained) == sorted(sampled)
        with pytest.raises(ValueError, match="has 3 token sequences"):
            _ = episode.ids


def read_leaves(result: EpisodeFinished, actions: list[Action]) -> list[tuple[object, ...]]:
    """What the learner would train of the episode."""
    own = sorted((one for one in actions if one.episode_id == result.episode_id), key=lambda one: one.turn)
    whole = build_sequence(result, own, [0.0] * len(own), CreditPlan(), 1.0)
    return [
        (one.segment, tuple(one.ids.tolist()), tuple(one.loss_mask.tolist()), tuple(one.logprobs.tolist()))
        for one in split_sequence(whole, list_leaves(own))
    ]


async def test_a_failed_environment_is_no_reward_of_zero() -> None:
    FailsSometimes.episodes = 0
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1", make=FailsSometimes)
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, TASKS[:1], group_size=4) as produced:
                (group,) = [group async for group in produced]
            assert sorted(episode.outcome for episode in group.episodes) == ["completed"] * 3 + ["env_failed"]
            assert len(group.graded) == 3
            (failed,) = [episode for episode in group.episodes if episode not in group.graded]
            assert (failed.reward, failed.error) == (None, "step: gone")


@pytest.mark.parametrize("reward", [1e308, -1e7, math.inf, math.nan])
async def test_an_episode_whose_reward_is_out_of_bounds_is_no_verdict(monkeypatch: pytest.MonkeyPatch, reward: float) -> None:
    """Of a worker that does not check its own: with it a whole batch would be NaN."""

    def forge(*arguments: Any, **facts: Any) -> EpisodeFinished:
        return msgspec.structs.replace(result.build_result(*arguments, **facts), reward=reward)

    monkeypatch.setattr(runner, "build_result", forge)
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, TASKS[:1], group_size=2) as produced:
                (group,) = [group async for group in produced]
    assert [(each.outcome, each.reward) for each in group.episodes] == [("verifier_unknown", None)] * 2
    assert all(each.error.startswith("its verdict does not count: reward_") for each in group.episodes)
    assert not group.graded


async def test_an_episode_whose_result_does_not_fit_its_actions_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "pack_mask", lambda mask: b"\xff" * ((len(mask) + 7) // 8))
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, TASKS[:1], group_size=2) as produced:
                (group,) = [group async for group in produced]
    assert [(each.outcome, each.reward, each.sequences) for each in group.episodes] == [("lost", None, ())] * 2
    assert all("do not fit its result" in each.error for each in group.episodes)


async def test_a_caller_that_takes_its_time_slows_the_fleet_down() -> None:
    with anyio.fail_after(10_000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            iterate_groups = 0
            async with rollouts(fleet.bus, fleet.configuration, TASKS, group_size=2, groups_at_a_time=2) as groups:
                async for _ in groups:
                    iterate_groups += 1
                    await anyio.sleep(100)
                    assert sum(map(len, fleet.results.values())) <= 2 * (iterate_groups + 2)
            assert iterate_groups == len(TASKS)


async def test_leaving_early_leaves_nothing_running_here() -> None:
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, TASKS, group_size=2) as groups:
                async for _ in groups:
                    break


async def test_an_episode_that_nobody_plays_ends_by_its_deadline() -> None:
    with anyio.fail_after(10_000):
        async with small_deployment() as fleet:
            async with rollouts(fleet.bus, fleet.configuration, TASKS[:1], group_size=2) as produced:
                (group,) = [group async for group in produced]
            assert [episode.outcome for episode in group.episodes] == ["timeout", "timeout"]
            assert group.graded == ()


class AwayAtFirst:
    """The bus of a server that leaves the first two questions for the log's state unanswered."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.unanswered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        if self.unanswered < 2:
            self.unanswered += 1
            raise RequestUnanswered("the server is away")
        return await self._bus.log_state(consumers)


async def test_a_server_that_is_away_as_rollouts_begin_is_waited_for() -> None:
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            bus = AwayAtFirst(fleet.bus)
            async with rollouts(cast("Bus", bus), fleet.configuration, TASKS[:1], group_size=2) as produced:
                (group,) = [group async for group in produced]
    assert bus.unanswered == 2
    assert len(group.graded) == 2


async def test_what_goes_wrong_in_the_caller_s_own_loop_comes_out_as_itself() -> None:
    with anyio.fail_after(1000):
        async with small_deployment() as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            with pytest.raises(ZeroDivisionError):
                async with rollouts(fleet.bus, fleet.configuration, TASKS[:1], group_size=2) as produced:
                    async for group in produced:
                        len(group.graded) / 0
            with pytest.raises(SessionFailed, match="refused"):
                async with sessions(fleet.bus, fleet.subjects):
                    raise SessionFailed(SessionAnswer(session="s", key="0", refusal="gap", error="refused"))


class Slow(ScriptedEnvironment):
    """An episode of three turns takes three eighths of what it may."""

    async def step(self, action: Action) -> Step:
        await anyio.sleep(LIMITS.episode / 8)
        return await super().step(action)


async def test_many_more_episodes_than_workers_have_slots_do_not_use_up_their_time_before_they_are_played() -> None:
    """A trainer's whole batch is asked for at once. Those that were cut were played again, long ones again and again."""
    tasks = [Task(key=f"t{number}", prompt="play") for number in range(32)]
    limits = msgspec.structs.replace(LIMITS, step=LIMITS.episode)
    with anyio.fail_after(10_000):
        async with small_deployment(build_configuration(limits=limits)) as fleet:
            fleet.environment("e1", make=Slow, slots=64)
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, tasks, group_size=8, groups_at_a_time=32) as produced:
                groups = [group async for group in produced]
    assert [len(group.graded) for group in groups] == [8] * 32


async def test_without_a_worker_all_groups_are_over_by_the_second_deadline() -> None:
    tasks = [Task(key=f"t{number}", prompt="play") for number in range(16)]
    with anyio.fail_after(2 * (LIMITS.episode + LIMITS.grace) + 60):
        async with (
            small_deployment() as fleet,
            rollouts(fleet.bus, fleet.configuration, tasks, group_size=8, groups_at_a_time=16) as produced,
        ):
            groups = [group async for group in produced]
    assert {episode.outcome for group in groups for episode in group.episodes} == {"timeout"} and len(groups) == 16


async def test_a_pool_without_workers_holds_up_no_group_of_another() -> None:
    """One of four tasks is of an environment that nobody serves: each of their groups held up all others for a deadline."""
    tasks = [Task(key=f"t{number}", prompt="play", env="" if number % 4 else "absent") for number in range(16)]
    run, environment = RunSettings(name=RUN, pool="absent=gone\ndefault"), EnvironmentSettings(slots=8, pools="default")
    with anyio.fail_after(1000):
        async with small_deployment(build_configuration(run=run, environment=environment)) as fleet:
            fleet.environment("e1")
            fleet.inference("i1")
            async with rollouts(fleet.bus, fleet.configuration, tasks, group_size=8) as produced:
                groups, ended_at = [], []
                async for group in produced:
                    groups.append(group)
                    ended_at.append(anyio.current_time())
    assert [len(group.graded) for group in groups] == [8] * 12 + [0] * 4
    assert ended_at[11] - ended_at[0] < 1


class Distant(AwayAtFirst):
    """The state of the log takes a while to arrive."""

    async def log_state(self, consumers: Sequence[str] = ()) -> LogState:
        state = await self._bus.log_state(consumers)
        await anyio.sleep(0.05)
        return state


async def test_groups_of_many_pools_are_not_asked_for_together_where_the_log_has_room_for_a_few() -> None:
    """Each pool looked for room by itself, and all found the same: the reserve for what was admitted was used up."""
    tasks = [Task(key=f"t{number}", prompt="play", env=f"e{number}") for number in range(32)]
    run = RunSettings(name=RUN, pool="\n".join(f"e{number}=pool-{number}" for number in range(32)))
    nats = NatsSettings(lanes=LANES, max_bytes=2 << 20)
    async with (
        small_deployment(build_configuration(run=run, nats=nats)) as fleet,
        rollouts(cast("Bus", Distant(fleet.bus)), fleet.configuration, tasks, group_size=8, groups_at_a_time=32),
    ):
        await anyio.sleep(LIMITS.episode / 2)
        asked = [entry async for entry in fleet.bus.scan([fleet.subjects.tasks()])]
        assert 8 <= len(asked) * UNMEASURED_BYTES <= FILL_SHARE * (2 << 20), len(asked)
