"""The deep audit over the log of a real learner: it proves what was trained, and each change of what was sampled is found."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest
import trio.testing

from fleetbus.audit.run import audit_run
from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import AlgorithmSettings, LearnerSettings, RunSettings
from fleetbus_schemas import Action, EpisodeFinished, Message, StepTrained, Task, VersionSpan, decode, encode
from fleetbus_schemas.tokens import extend_history, pack_logprobs, unpack_logprobs
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.digest_audit import DigestReport, audit_digests
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.small_deployment import RUN, build_configuration, small_deployment

pytestmark = pytest.mark.integration

STEPS, GROUPS, GROUP_SIZE = 3, 2, 4
TRAINED = STEPS * GROUPS * GROUP_SIZE
TASKS = [Task(key=f"task-{index}", prompt="play") for index in range(4)]

Log = list[StreamEntry]
M = TypeVar("M", bound=Message)


async def train(folder: Path, **algorithm: Any) -> Log:
    """The log of a run that a second learner took over."""
    configuration = build_configuration(
        run=RunSettings(name=RUN, folder=str(folder)),
        learner=LearnerSettings(steps=STEPS, groups=GROUPS, group_size=GROUP_SIZE, checkpoint_every=1, stale_groups="keep"),
        algorithm=AlgorithmSettings(**algorithm),
    )
    with anyio.fail_after(3600):
        async with small_deployment(configuration) as fleet:
            workers = [fleet.environment("environment-0"), fleet.inference("inference-0")]
            doomed = fleet.learner("learner-0", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            async with fleet.bus.read([fleet.subjects.train("default")]) as reader:
                while b"CheckpointStored" not in (await reader.receive()).payload:
                    pass
            doomed.kill()
            learner = fleet.learner("learner-1", trainer=ScriptedTrainer(), curriculum=Curriculum(TASKS, TASKS, seed=1))
            await learner.ended.wait()
            assert learner.failure() is None
            await fleet.drain_members(workers)
            assert (await audit_run(fleet.bus, fleet.subjects)).balanced
            return [entry async for entry in fleet.bus.scan([fleet.subjects.log])]


def run_virtually(folder: Path, **algorithm: Any) -> Log:
    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(partial(train, folder, **algorithm), backend="trio", backend_options={"clock": clock})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return run_virtually(tmp_path_factory.mktemp("run"))


def audit(log: Log) -> DigestReport:
    async def scan() -> AsyncIterator[StreamEntry]:
        for entry in log:
            yield entry

    return anyio.run(partial(audit_digests, scan, last_sequence=log[-1].sequence))


def change(log: Log, message_type: type[M], changes: Callable[[M], dict[str, Any]], where: Callable[[M], bool]) -> Log:
    """The log with the first such message changed."""
    kinds = {Action: "act", EpisodeFinished: "episode", StepTrained: "train"}
    for index, entry in enumerate(log):
        if entry.subject.split(".")[2] == kinds[message_type] and message_type.__name__.encode() in entry.payload[:64]:
            message = decode(message_type, entry.payload, subject=entry.subject)
            if where(message):
                changed = msgspec.structs.replace(message, **changes(message))  # type: ignore[type-var]
                return [*log[:index], msgspec.structs.replace(entry, payload=encode(changed)), *log[index + 1 :]]
    raise AssertionError("no such message")


def list_trained(log: Log) -> set[str]:
    steps = [decode(StepTrained, entry.payload, subject="") for entry in log if b"StepTrained" in entry.payload[:64]]
    return {episode for step in steps for episode in step.episodes}


def other_token(action: Action) -> dict[str, Any]:
    """As somebody would forge it who knows of history hashes."""
    sampled = bytes([action.sampled[0] ^ 1]) + action.sampled[1:]
    return {"sampled": sampled, "history_hash": extend_history(b"", action.prompt_delta, sampled)}


def other_logprob(action: Action) -> dict[str, Any]:
    first, *others = unpack_logprobs(action.logprobs)
    return {"logprobs": pack_logprobs([first - 0.5, *others])}


def other_version(action: Action) -> dict[str, Any]:
    return {"versions": (VersionSpan(version=action.versions[0].version + 7, start=0, stop=len(action.sampled) // 4),)}


def other_mask(result: EpisodeFinished) -> dict[str, Any]:
    mask = int.from_bytes(result.loss_mask, "little")
    shifted = (mask ^ (mask & -mask)) | 1  # as many tokens, but the first of a prompt instead of the first that was sampled
    return {"loss_mask": shifted.to_bytes(len(result.loss_mask), "little")}


def other_reward(result: EpisodeFinished) -> dict[str, Any]:
    return {"reward": 5.0 - (result.reward or 0.0)}


def test_every_trained_episode_of_a_run_is_proven(log: Log) -> None:
    assert audit(log) == DigestReport(proven=TRAINED, findings=())


@pytest.mark.parametrize(
    "algorithm",
    [{"credit_assignment": "turn"}, {"mask_truncated_completions": True, "truncated_when": "outcome"}, {"overlong_buffer": 8}],
    ids=["credit per turn", "truncated episodes masked", "overlong episodes penalised"],
)
def test_the_proof_follows_the_settings_that_the_lineage_names(algorithm: dict[str, Any], tmp_path: Path) -> None:
    assert audit(run_virtually(tmp_path, **algorithm)) == DigestReport(proven=TRAINED, findings=())


@pytest.mark.parametrize("changes", [other_token, other_logprob, other_version])
def test_a_changed_action_of_a_trained_episode_is_found(log: Log, changes: Callable[[Action], dict[str, Any]]) -> None:
    trained = list_trained(log)
    forged = change(log, Action, changes, lambda action: action.episode_id in trained and action.turn == 0)
    (finding,) = audit(forged).findings
    assert (finding.kind, finding.count) == ("digest_wrong", 1)
    assert audit(forged).proven == TRAINED - 1


@pytest.mark.parametrize("tokens", [-1, 0, 1 << 50])
def test_a_result_that_counts_other_tokens_than_were_trained_is_found(log: Log, tokens: int) -> None:
    trained = list_trained(log)
    forged = change(log, EpisodeFinished, lambda _: {"tokens": tokens}, lambda result: result.episode_id in trained)
    assert [(finding.kind, finding.count) for finding in audit(forged).findings] == [("digest_wrong", 1)]


@pytest.mark.parametrize("named", ["never-requested", "of its group"])
def test_a_result_on_the_subject_of_another_episode_proves_and_disproves_nothing(log: Log, named: str) -> None:
    first, second, *_ = sorted(list_trained(log))
    name = second if named == "of its group" else named
    stored = EpisodeFinished(episode_id=name, group_id="g", attempt=1, outcome="completed", worker="w", reward=1.0)
    entry = msgspec.structs.replace(log[0], subject=f"fb.{RUN}.episode.{first}", payload=encode(stored))
    assert audit([entry, *log]) == DigestReport(proven=TRAINED, findings=())


def test_a_changed_loss_mask_is_found(log: Log) -> None:
    trained = list_trained(log)
    (finding,) = audit(change(log, EpisodeFinished, other_mask, lambda result: result.episode_id in trained)).findings
    assert (finding.kind, finding.count) == ("digest_wrong", 1)


def test_a_changed_reward_is_found_by_the_advantages_of_its_group(log: Log) -> None:
    trained = list_trained(log)
    (finding,) = audit(change(log, EpisodeFinished, other_reward, lambda result: result.episode_id in trained)).findings
    assert (finding.kind, finding.count) == ("digest_wrong", GROUP_SIZE)


def test_a_step_without_digests_is_not_proven(log: Log) -> None:
    forged = change(log, StepTrained, lambda step: {"digests": ()}, lambda step: step.step == 1)
    (finding,) = audit(forged).findings
    assert (finding.kind, finding.ids) == ("digest_missing", ("l1/1",))
    assert audit(forged).proven == TRAINED - GROUPS * GROUP_SIZE
