"""Episodes whose reward has a judge's part: absolute and by group, from a real HTTP server to the audit and the replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from fleetbus.config.settings import Configuration, EvaluationSettings, LearnerSettings, RunSettings
from fleetbus.config.training_settings import RewardSettings
from fleetbus.log.episodes import decode_entries
from fleetbus.recording import Recording, RecordingHeader
from fleetbus_schemas import EpisodeFinished, StepTrained, Task
from fleetbus_schemas.channels import STORED
from fleetbus_workers.environment.adapter_context import Factory
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import HoldsElsewhere, LivesElsewhere, Verdict
from fleetbus_workers.environment.composed_reward import ComposedRewardFactory
from fleetbus_workers.judge.client import Judge
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.digest_audit import audit_digests
from fleetbus_workers.learner.group_judge import GroupJudge
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.replay.driver import ReplayContext
from fleetbus_workers.replay.environment_driver import replay_environment
from fleetbus_workers.replay.learner_replay import replay_learner
from fleetbus_workers.replay.options import Replay
from fleetbus_workers.replay.recorded_judge import RecordedJudge
from tests.support.judge_server import JudgeServer, scores, serve_judge
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment

pytestmark = pytest.mark.timeout(120)


class Named(ScriptedEnvironment):
    """Its verdict has a part of its own; it holds something elsewhere."""

    held = "a lease"

    async def release(self, task: Task, held: str) -> None: ...

    async def verify(self) -> Verdict:
        return Verdict(reward=0.5, components={"style": 2.0})


def build_judge(server: JudgeServer) -> Judge:
    settings = RewardSettings(judge_url=server.url, judge_model="judge-1", judge_seconds=5.0)
    return Judge(settings, rubric="Be strict.")


def wrap(judge: object, /, *, groups: bool = False, **weights: float) -> ComposedRewardFactory:
    return ComposedRewardFactory(Factory(Named), weights, judge, max_chars=9000, judges_groups=groups)  # type: ignore[arg-type]


async def record(fleet: SmallDeployment) -> Recording:
    entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    configuration = {"reward": {"judge_url": "http://nobody.invalid"}}
    return Recording(path=Path("in-memory"), header=RecordingHeader(run=RUN, configuration=configuration), entries=entries)


async def play_one(judge: Judge, /, **weights: float) -> tuple[EpisodeFinished, Recording]:
    """The result of one episode that the judge grades, and what was recorded of it."""
    with anyio.fail_after(60):
        async with small_deployment() as fleet:
            fleet.environment("environment-1", make=wrap(judge, groups=False, **weights))
            fleet.inference("inference-1")
            await fleet.request("e1")
            result = await fleet.result("e1")
            await fleet.drain_members()
            recording = await record(fleet)
            await judge.close()
    return result, recording


async def test_a_reward_is_made_of_verdict_judge_and_named_parts_and_replays_without_the_judge() -> None:
    async with serve_judge(lambda messages: scores(4)) as server:
        result, recording = await play_one(build_judge(server), verifier=1.0, judge=2.0, style=-0.1)
        assert result.reward_components == {"verifier": 0.5, "style": 2.0, "judge": 0.4}
        assert result.reward == pytest.approx(0.5 + 2 * 0.4 - 0.1 * 2)
        (asked,) = server.asked
        assert "[user]\n  play" in asked["messages"][1]["content"] and "[assistant]" in asked["messages"][1]["content"]

    configuration = build_configuration(reward=RewardSettings(weights="verifier=1,judge=2,style=-0.1"))
    context = ReplayContext(recording, Replay(role="environment", patience_seconds=30), configuration=configuration)
    await replay_environment(context, wrap(RecordedJudge(), verifier=1.0, judge=2.0, style=-0.1))
    assert not context.report.differences and context.report.compared["EpisodeFinished"] == 1
    context = ReplayContext(recording, Replay(role="environment", patience_seconds=30), configuration=configuration)
    await replay_environment(context, wrap(RecordedJudge(), verifier=1.0, judge=1.0, style=-0.2))
    assert not context.report.differences, "weights are the recorded ones"


async def test_an_episode_that_the_judge_does_not_score_has_no_reward_and_says_why() -> None:
    async with serve_judge(lambda messages: "I like it.") as server:
        result, recording = await play_one(build_judge(server), verifier=1.0, judge=1.0)
    assert (result.outcome, result.reward, result.error_class) == ("verifier_unknown", None, "no_verdict")
    assert result.error == "judge: its answer does not end with a JSON object with scores"
    assert result.reward_components == {"verifier": 0.5, "style": 2.0}
    context = ReplayContext(recording, Replay(role="environment"), configuration=build_configuration())
    await replay_environment(context, wrap(RecordedJudge(), verifier=1.0, judge=1.0))
    assert context.report.skipped == {"episodes without the judge's score": 1}


async def test_a_missing_component_costs_no_question() -> None:
    async with serve_judge(lambda messages: scores(4)) as server:
        judge = build_judge(server)
        environment = wrap(judge, judge=1.0, depth=1.0)()
        parts = {"style": 2.0, "verifier": 0.5}
        assert await environment.verify() == Verdict(reward=None, reason="no value of judge, depth", components=parts)
        assert not server.asked
        await judge.close()


def test_what_outlives_a_worker_is_still_told_through_the_wrapper() -> None:
    assert isinstance(wrap(None)(), HoldsElsewhere)
    plain = ComposedRewardFactory(Factory(ScriptedEnvironment), {}, None, max_chars=9000)
    assert not isinstance(plain(), HoldsElsewhere | LivesElsewhere)

    class Distant(Named):
        def assign(self, request: object, attempt: int, recorded: object) -> None:
            self.attempt = attempt

    distant = ComposedRewardFactory(Factory(Distant), {}, None, max_chars=9000)()
    assert isinstance(distant, LivesElsewhere) and isinstance(distant, HoldsElsewhere)
    distant.assign(None, 3, ())  # type: ignore[arg-type]
    assert distant.implementation.attempt == 3  # type: ignore[attr-defined]


class RememberingTrainer(ScriptedTrainer):
    """Remembers the advantage of each episode."""

    def __init__(self) -> None:
        super().__init__()
        self.advantages: dict[str, float] = {}

    def train(self, batch: Sequence[object], *, version: int, progress: float) -> dict[str, float]:
        for each in batch:
            self.advantages[each.episode_id] = float(each.advantages.max() + each.advantages.min())  # type: ignore[attr-defined]
        return super().train(batch, version=version, progress=progress)  # type: ignore[arg-type]


def settings(folder: Path, steps: int) -> Configuration:
    return build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        learner=LearnerSettings(steps=steps, groups=1, group_size=2, advantage_estimator="dr_grpo", checkpoint_every=9),
        evaluation=EvaluationSettings(episodes=0),
    )


async def learn(folder: Path, server: JudgeServer, steps: int) -> tuple[Recording, list[StepTrained], RememberingTrainer]:
    trainer, judge = RememberingTrainer(), build_judge(server)
    tasks = [Task(key=f"task-{index}", prompt="play") for index in range(3)]
    with anyio.fail_after(60):
        async with small_deployment(settings(folder, steps), published=False) as fleet:
            workers = [
                fleet.environment("environment-1", make=wrap(judge, groups=True, verifier=1.0, judge=2.0)),
                fleet.inference("inference-1"),
            ]
            learner = fleet.learner(
                "learner-1", trainer=trainer, curriculum=Curriculum(tasks, [], seed=1), judge=GroupJudge(judge, weight=2.0)
            )
            await learner.ended.wait()
            await fleet.drain_members(workers)
            recording = await record(fleet)
            await judge.close()
    trained = [entry for entry in recording.entries if ".train." in entry.subject]
    return recording, [step for _, step in decode_entries(StepTrained, trained, beside=STORED["train"])], trainer


async def test_a_group_is_judged_together_and_audited_and_replayed_by_what_was_recorded(tmp_path: Path) -> None:
    async with serve_judge(lambda messages: scores(2, 8)) as server:
        recording, steps, trainer = await learn(tmp_path / "run", server, 2)
        assert len(server.asked) == 2 and all(call["messages"][1]["content"].count("begins") == 2 for call in server.asked)
    for step in steps:
        first, second = sorted(step.episodes)
        assert step.rewards == {first: pytest.approx(0.5 + 2 * 0.2), second: pytest.approx(0.5 + 2 * 0.8)}
        assert (trainer.advantages[first], trainer.advantages[second]) == (pytest.approx(-0.6), pytest.approx(0.6))
        assert step.metrics["reward_judge"] == pytest.approx(0.5)

    async def scan():  # type: ignore[no-untyped-def]
        for entry in recording.entries:
            yield entry

    proof = await audit_digests(scan, last_sequence=recording.entries[-1].sequence)
    assert (proof.proven, proof.findings) == (4, ())
    context = ReplayContext(recording, Replay(role="learner", patience_seconds=30), configuration=settings(tmp_path / "run", 2))
    await replay_learner(context, lambda configuration: RememberingTrainer(), folder=tmp_path / "replayed")
    assert not context.report.differences and context.report.compared["StepTrained"] == 2


async def test_a_group_that_the_judge_does_not_score_is_excluded_with_the_reason(tmp_path: Path) -> None:
    async with serve_judge(lambda messages: scores(2, 8)) as server:
        server.statuses.append(400)
        _, (step,), trainer = await learn(tmp_path / "run", server, 1)
    assert [each.reason for each in step.excluded][:2] == ["judge_failed", "judge_failed"]
    assert not set(trainer.advantages) & {each.episode_id for each in step.excluded}


def test_an_unjudged_result_keeps_its_bytes() -> None:
    plain = EpisodeFinished(episode_id="e", group_id="g", attempt=1, outcome="completed", worker="w", reward=1.0)
    assert b"transcript" not in msgspec.msgpack.encode(plain) and b"reward_components" not in msgspec.msgpack.encode(plain)
