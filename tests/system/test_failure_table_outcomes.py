"""Episodes, engines, environments or weights are bad: a recorded outcome, and the run goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import anyio
import msgspec
import pytest

from fleetbus.bus.memory_bus import MemoryBus
from fleetbus_schemas import Action, ChatMessage, PolicyPublished, Task, ToolSpec
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.episode.stages import DEADLINE_PASSED
from fleetbus_workers.inference.base import WeightsRejected
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.inference.worker import TRIES_OF_THE_NEWEST
from tests.support.deployment_member import Member
from tests.support.interrupted_deployment import (
    PATIENT,
    BreakingSampler,
    has_ended_members,
    make_slow_sampler,
    start_deployment,
)
from tests.support.small_deployment import SmallDeployment, build_configuration, small_deployment
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time


# an episode that kills whoever runs it; an observation that kills the engine: after 3 tries a recorded outcome; the fleet lives


class Deadly(ScriptedEnvironment):
    """A task with ``deadly`` in its key kills its worker in the second turn."""

    def __init__(self, kill: Callable[[], None]) -> None:
        super().__init__()
        self._kill = kill

    async def open(self, task: Task) -> None:
        self._is_deadly = "deadly" in task.key
        await super().open(task)

    async def step(self, action: Action) -> Step:
        if self._is_deadly and action.turn == 1:
            self._kill()
            await anyio.sleep_forever()
        return await super().step(action)


def deadly_worker(fleet: SmallDeployment, name: str) -> Member:
    """A worker that its episodes may kill."""

    def make() -> ScriptedEnvironment:
        return Deadly(lambda: fleet.members[name].kill())

    return fleet.environment(name, make=make)


async def test_an_episode_that_kills_whoever_runs_it_is_recorded_as_lost_after_three_tries() -> None:
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.inference("inference-0")
            workers = [deadly_worker(fleet, f"environment-{index}") for index in range(3)]
            await fleet.heard(*workers)
            await fleet.request("deadly", task=Task(key="deadly"))
            for deaths in (1, 2, 3):
                await fleet.until(partial(has_ended_members, workers, deaths))
                workers.append(deadly_worker(fleet, f"environment-{len(workers)}"))
            result = await fleet.result("deadly")
            assert (result.outcome, result.error_class, result.attempts, result.reward) == ("lost", "poison", 3, None)
            await fleet.request("sound")
            assert (await fleet.result("sound")).outcome == "completed"
            await fleet.check_at_rest()


async def test_what_runs_beside_an_episode_that_kills_its_worker_is_not_taken_for_another() -> None:
    """One worker plays all of them, and loses all of them twice; then those that might be the cause run one by one."""
    names = [f"neighbour-{index}" for index in range(7)]
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.inference("inference-0", sampler=make_slow_sampler())
            workers = [deadly_worker(fleet, "environment-0")]
            await fleet.heard(*workers)
            for name in [*names, "deadly"]:
                await fleet.request(name, task=Task(key=name, prompt="play", config={"turns": 4}))
            for deaths in (1, 2, 3):
                await fleet.until(partial(has_ended_members, workers, deaths))
                workers.append(deadly_worker(fleet, f"environment-{deaths}"))
            results = {name: await fleet.result(name) for name in [*names, "deadly"]}
            assert (results["deadly"].outcome, results["deadly"].error_class) == ("lost", "poison")
            assert {results[name].outcome for name in names} == {"completed"}
            assert min(results[name].attempts for name in names) == 3, "they were lost with it twice"
            await fleet.check_at_rest()


@pytest.mark.parametrize("gently", [False, True], ids=["the worker dies", "the worker says so"])
async def test_an_observation_that_kills_the_engine_is_recorded_as_lost_after_its_hops(gently: bool) -> None:
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            samplers = [BreakingSampler("bad", gently=gently) for _ in range(8)]
            engines = [fleet.inference(f"inference-{index}", sampler=samplers[index]) for index in range(2)]
            await fleet.heard(*engines)
            await fleet.request("bad", task=Task(key="task", prompt="bad"))
            for deaths in (1, 2, 3, 4) if not gently else ():
                await fleet.until(partial(has_ended_members, engines, deaths))
                engines.append(fleet.inference(f"inference-{len(engines)}", sampler=samplers[len(engines)]))
            result = await fleet.result("bad")
            dead = [engine for engine in engines if engine.ended.is_set()]
            assert [type(engine.failure()) for engine in dead] == [ZeroDivisionError] * (0 if gently else 4)
            assert (result.outcome, result.error_class, result.reward) == ("lost", "poison_observation", None)
            assert sum(sampler.tries for sampler in samplers) == 1 + fleet.configuration.environment.max_hops
            await fleet.request("sound")
            assert (await fleet.result("sound")).outcome == "completed"
            await fleet.check_at_rest()


async def test_an_observation_that_kills_engines_is_bounded_too_where_the_servers_clock_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryBus, "now_ns", lambda bus: bus._server.now_ns() - 300 * 10**9)
    with anyio.fail_after(2000):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            await fleet.request("bad", task=Task(key="task", prompt="bad"))
            engines: list[Member] = []
            while len(engines) <= fleet.configuration.environment.max_hops:
                engines.append(fleet.inference(f"inference-{len(engines)}", sampler=BreakingSampler("bad")))
                await engines[-1].ended.wait()
                assert isinstance(engines[-1].failure(), ZeroDivisionError)
            fleet.inference("sound")
            assert (await fleet.result("bad")).error_class == "poison_observation"


# env hangs, env raises, verifier raises, tool unknown, malformed tool call, NaN reward, 10 MB observation: the outcome table


class Trouble(ScriptedEnvironment):
    """The trouble that the task's key names, in the second turn."""

    async def open(self, task: Task) -> None:
        self._trouble = task.key
        await super().open(task)

    async def step(self, action: Action) -> Step:
        if action.turn == 1:
            match self._trouble:
                case "hangs":
                    await anyio.sleep_forever()
                case "raises":
                    raise EnvironmentFailed("no more")
                case "not a number":
                    return Step(reward=math.nan)
                case "ten megabytes":
                    return Step(messages=(ChatMessage(role="user", content="x" * 10_000_000),))
        return await super().step(action)

    async def verify(self) -> Verdict:
        if self._trouble == "verifier raises":
            raise ZeroDivisionError
        return await super().verify()

    async def close(self) -> None:
        if self._trouble == "close raises":
            raise OSError("already gone")


OUTCOMES = {
    "hangs": "timeout",
    "raises": "env_failed",
    "verifier raises": "verifier_unknown",
    "not a number": "verifier_unknown",
    "ten megabytes": "truncated",
    "close raises": "completed",
    "nothing": "completed",
}


async def test_whatever_an_environment_does_there_is_an_outcome_and_the_fleet_goes_on() -> None:
    """Tools unknown and calls malformed are in test_sessions_under_stress_tools.py."""
    async with start_deployment(make=Trouble, environments=1) as fleet:
        for index, trouble in enumerate([*OUTCOMES] * 3):
            await fleet.request(f"e{index}", task=Task(key=trouble, prompt="play"))
        results = await fleet.all_results(21)
        assert Counter((result.task_key, result.outcome) for result in results) == dict.fromkeys(OUTCOMES.items(), 3)
        assert all((result.reward is None) == (result.outcome not in ("completed", "truncated")) for result in results)


async def test_an_episode_without_a_call_that_could_be_read_says_what_the_policy_wrote() -> None:
    class Tooled(ScriptedEnvironment):
        async def open(self, task: Task) -> None:
            await super().open(task)
            self._is_graded = task.key != "ungraded"

        async def reset(self) -> Start:
            offered = () if self._prompt == "bare" else (ToolSpec(name="look", description="", parameters={}),)
            return msgspec.structs.replace(await super().reset(), offered=offered)

        async def verify(self) -> Verdict:
            return Verdict(reward=0.0) if self._is_graded else Verdict(reward=None, reason="no reward")

    async with start_deployment(make=lambda: Tooled(100), environments=1) as fleet:
        for name, prompt in (("graded", "play"), ("ungraded", "play"), ("bare", "bare")):
            await fleet.request(name, task=Task(key=name, prompt=prompt))
        results = {result.episode_id: result for result in await fleet.all_results(3)}
    turns = results["graded"].turns
    said = f"no tool call could be read in its {turns} turns: give a --model that writes some, or "
    assert turns > 1 and results["graded"].note.startswith(said) and "the policy writes '" in results["graded"].note
    assert (results["ungraded"].outcome, results["bare"].note) == ("verifier_unknown", "")
    assert results["ungraded"].error.startswith(f"no reward; {said}")


async def test_only_the_whole_episode_limits_a_step_of_an_environment_that_paces_itself() -> None:
    class OwnPace(Trouble):
        paces_itself = True

        async def step(self, action: Action) -> Step:
            if self._trouble == "slow":
                await anyio.sleep(10 * fleet.configuration.limits.step)
            return await super().step(action)

    async with start_deployment(make=OwnPace, environments=1) as fleet:
        await fleet.request("slow", task=Task(key="slow", prompt="play"), deadline_seconds=1e4)
        await fleet.request("hangs", task=Task(key="hangs", prompt="play"), deadline_seconds=4.0)
        results = {result.episode_id: result for result in await fleet.all_results(2)}
        assert results["slow"].outcome == "completed"
        assert (results["hangs"].error_class, results["hangs"].error) == ("episode_timeout", DEADLINE_PASSED)


async def test_a_time_out_that_was_given_a_reward_is_trained_if_anything_was_sampled() -> None:
    """The episode as a whole counts as well as one of its stages; what never began has nothing to train."""

    class Unopened(Trouble):
        async def open(self, task: Task) -> None:
            await super().open(task)
            if task.prompt == "closed":
                await anyio.sleep_forever()

    async with start_deployment(make=Unopened, environments=1) as fleet:
        await fleet.request("stage", task=Task(key="hangs", prompt="play"), timeout_reward=-0.5)
        await fleet.request("whole", task=Task(key="hangs", prompt="play"), timeout_reward=-0.5, deadline_seconds=4.0)
        await fleet.request("unopened", task=Task(key="nothing", prompt="closed"), timeout_reward=-0.5)
        results = {result.episode_id: result for result in await fleet.all_results(3)}
        for name, error_class in (("stage", "step_timeout"), ("whole", "episode_timeout")):
            result = results[name]
            assert (result.outcome, result.reward, result.error_class) == ("truncated", -0.5, error_class)
            assert result.actions and result.note and not result.error
        assert (results["unopened"].outcome, results["unopened"].reward) == ("timeout", None)


# model emits garbage, engine dies, weights corrupt or of the wrong shape: version unchanged until good (see also *_engine.py)


class Choosy(ScriptedSampler):
    """Refuses versions whose file is called bad."""

    async def load(self, policy: PolicyPublished) -> None:
        if "bad" in policy.uri:
            raise WeightsRejected(f"{policy.uri}: differs from the manifest's sha256")
        await super().load(policy)


async def test_a_bad_version_changes_nothing_until_a_good_one_comes() -> None:
    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            engine = fleet.inference("inference-0", sampler=Choosy())
            fleet.environment("environment-0")
            await fleet.heard(engine)
            await fleet.until(lambda: fleet.beats[engine.name].counters.get("versions_loaded") == 1)
            await fleet.publish_policy(1, uri="bad")
            await fleet.request("before")
            assert (await fleet.result("before")).policy_versions == (0,)
            await fleet.until(lambda: fleet.beats[engine.name].counters.get("weights_rejected") == 1)
            assert fleet.beats[engine.name].policy_version == 0
            await fleet.publish_policy(2, uri="good")
            await fleet.until(lambda: fleet.beats[engine.name].policy_version == 2)
            await fleet.request("after")
            assert (await fleet.result("after")).policy_versions == (2,)


class Slow(Choosy):
    """Takes its time for a version whose file is called slow."""

    async def load(self, policy: PolicyPublished) -> None:
        if policy.uri == "slow":
            await anyio.sleep(30)
        await super().load(policy)


async def test_a_version_that_was_passed_over_is_loaded_where_the_newest_cannot_be_had() -> None:
    with anyio.fail_after(300):
        async with small_deployment() as fleet:
            engine = fleet.inference("inference-0", sampler=Slow())
            fleet.environment("environment-0")
            await fleet.heard(engine)
            await fleet.publish_policy(1, uri="slow")
            await anyio.sleep(5)
            await fleet.publish_policy(2, uri="good")
            await fleet.publish_policy(3, uri="bad")
            await fleet.until(lambda: fleet.beats[engine.name].policy_version == 2)
            assert fleet.beats[engine.name].counters["weights_rejected"] == TRIES_OF_THE_NEWEST
            await fleet.until(lambda: fleet.beats[engine.name].counters["weights_rejected"] > TRIES_OF_THE_NEWEST)
            assert fleet.beats[engine.name].policy_version == 2
            await fleet.publish_policy(4, uri="good")
            await fleet.until(lambda: fleet.beats[engine.name].policy_version == 4)


async def test_a_worker_whose_first_version_is_bad_takes_no_work_until_a_good_one_comes() -> None:
    with anyio.fail_after(100):
        async with small_deployment() as fleet:
            await fleet.publish_policy(1, uri="bad")
            engine = fleet.inference("inference-0", sampler=Choosy())
            fleet.environment("environment-0")
            await fleet.request()
            await anyio.sleep(4)
            assert fleet.beats[engine.name].in_flight == 0
            assert not fleet.results["e"]
            await fleet.publish_policy(2, uri="good")
            assert (await fleet.result()).policy_versions == (2,)


async def test_an_observation_that_was_handed_back_again_and_again_is_no_poison() -> None:
    """Found on three servers that were restarted one after another: deliveries that nobody died of counted as tries."""
    with anyio.fail_after(600):
        async with small_deployment(build_configuration(limits=PATIENT)) as fleet:
            fleet.environment("environment-0")
            await fleet.request("e")
            async with fleet.bus.pull("obs_default_any", credits=1) as pulling:
                for _ in range(2 * fleet.configuration.environment.max_hops):
                    await (await pulling.receive()).nak()
                    pulling.grant()
            fleet.inference("inference-0")
            assert (await fleet.result("e")).outcome == "completed"
