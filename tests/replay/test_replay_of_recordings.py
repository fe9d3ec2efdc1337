"""Recordings of real runs replay as recorded, for each role; whatever is changed in a worker is found and named.

`warehouse.fbrec` are episodes of the default task, `guessing.fbrec` is a whole small run on the environment `guessing.py` with
the tiny model beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.config.settings import Configuration
from fleetbus.core.algorithms import advantages
from fleetbus.recording import Recording, load_recording
from fleetbus_schemas import ChatMessage, PolicyPublished, Task, decode, encode
from fleetbus_workers.environment.base import Start, Step
from fleetbus_workers.replay import Replay, Report
from fleetbus_workers.replay.fixtures import replay_blocking
from fleetbus_workers.replay.report import TRAINING

HERE = Path(__file__).parent
GUESSING = HERE / "recordings" / "guessing.fbrec"
WAREHOUSE = HERE / "recordings" / "warehouse.fbrec"
MODEL = HERE / "recordings" / "model"

pytestmark = pytest.mark.timeout(300)

SLOW_MACHINE_SECONDS = 200.0
"""Patience where an engine or a trainer is loaded first."""

OTHER_MACHINE = ("PolicyPublished.manifest", "StepTrained.metrics.loss", "StepTrained.metrics.grad_norm")
"""Another CPU adds up in another order: a recording from elsewhere cannot promise the last bit of its weights."""


def guessing() -> Any:
    """The environment that `guessing.fbrec` was recorded on."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("guessing", HERE / "guessing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Guessing


def test_an_environment_of_ones_own_replays_as_recorded(replay: Any) -> None:
    report = replay("recordings/guessing.fbrec", environment=guessing())
    assert report.compared == {"Observation": 66, "EpisodeFinished": 33}


def test_the_default_environment_replays_as_recorded(replay: Any) -> None:
    report = replay("recordings/warehouse.fbrec")
    assert report.compared == {"Observation": 46, "EpisodeFinished": 17}


def test_a_different_tool_result_is_found_and_named() -> None:
    kind = guessing()

    class Changed(kind):  # type: ignore[misc, valid-type]
        answer = "is worth {worth}"

    difference = differing(replay_blocking(GUESSING, environment=Changed))
    assert difference.message.startswith("Observation of turn 1 of episode ")
    assert difference.field == "messages[0].content"
    assert (difference.recorded[1:7], difference.replayed[1:10]) == ("worth ", "is worth ")
    assert any("action of turn 0" in line for line in difference.context)


def test_a_different_prompt_is_found_at_the_first_turn() -> None:
    kind = guessing()

    class Changed(kind):  # type: ignore[misc, valid-type]
        async def reset(self) -> Start:
            return Start(messages=(ChatMessage(role="system", content="Be good."), *(await super().reset()).messages))

    difference = differing(replay_blocking(GUESSING, environment=Changed))
    assert "turn 0" in difference.message and difference.field == "messages[0].role"


def test_a_different_reward_is_found_and_named() -> None:
    kind = guessing()

    class Changed(kind):  # type: ignore[misc, valid-type]
        async def verify(self) -> Any:
            verdict = await super().verify()
            return msgspec.structs.replace(verdict, reward=verdict.reward + 0.5)

    difference = differing(replay_blocking(GUESSING, environment=Changed))
    assert difference.message.startswith("EpisodeFinished of episode ") and difference.field == "reward"


def test_an_episode_that_goes_on_longer_is_found() -> None:
    kind = guessing()

    class Longer(kind):  # type: ignore[misc, valid-type]
        turns = 3

    difference = differing(replay_blocking(GUESSING, environment=Longer))
    assert "EpisodeFinished" in difference.message
    assert difference.field in ("outcome", "turns", "type", "error_class")


def test_an_environment_that_raises_is_found() -> None:
    kind = guessing()

    class Raising(kind):  # type: ignore[misc, valid-type]
        async def step(self, action: Any) -> Step:
            raise RuntimeError("out of order")

    difference = differing(replay_blocking(GUESSING, environment=Raising))
    assert difference.replayed == "EpisodeFinished env_failed RuntimeError RuntimeError: out of order" or (
        difference.replayed.startswith("EpisodeFinished env_failed") and "out of order" in difference.replayed
    )


@pytest.mark.integration
def test_an_environment_that_hangs_is_found() -> None:
    kind = guessing()

    class Hanging(kind):  # type: ignore[misc, valid-type]
        async def open(self, task: Task) -> None:
            import anyio

            await anyio.sleep_forever()

    report = replay_blocking(GUESSING, environment=Hanging, patience_seconds=1.0)
    assert differing(report).replayed == "nothing within 1 s"
    assert len(report.differences) == 33


@pytest.mark.parametrize("sample_again", [False, True])
def test_the_inference_role_replays_as_recorded(sample_again: bool) -> None:
    pytest.importorskip("torch")
    report = replay_blocking(
        GUESSING, role="inference", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL, sample_again=sample_again
    )
    report.check()
    assert report.compared == {"Action": 66}


@pytest.mark.parametrize("sample_again", [False, True])
def test_a_changed_template_is_found_and_named(tmp_path: Path, sample_again: bool) -> None:
    pytest.importorskip("torch")
    changed = copy_of_model(tmp_path)
    file = changed / "chat_template.jinja"
    file.write_text(file.read_text().replace("{{ message.content }}", "{{ message.content }} "))
    report = replay_blocking(
        GUESSING, role="inference", patience_seconds=SLOW_MACHINE_SECONDS, model=changed, sample_again=sample_again
    )
    difference = differing(report)
    assert difference.message.startswith("Action of turn 0 of episode ") and difference.field.startswith("prompt_delta")


def test_weights_that_do_not_fit_the_recording_are_not_replayed_as_if_they_did(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recording = load_recording(GUESSING)
    recording.files = dict.fromkeys(recording.files, b"no weights")
    report = replay_blocking(recording, role="inference", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL)
    assert not report.same and not report.compared
    assert any(reason.startswith("versions without weights") for reason in report.skipped)


def test_turns_of_a_version_that_is_gone_are_left_out_and_later_versions_are_compared() -> None:
    pytest.importorskip("torch")
    recording = load_recording(GUESSING)
    first = min(recording.files)
    recording.files[first] = b"no weights"
    report = replay_blocking(recording, role="inference", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL)
    report.check()
    assert 0 < report.compared["Action"] < 66
    assert report.compared["Action"] + report.skipped["actions whose version is not at hand"] == 66


def test_weights_that_are_gone_are_named_once_and_the_report_says_how_to_record_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recording = load_recording(GUESSING)
    recording.entries = [published_in(tmp_path, entry) for entry in recording.entries]
    recording.files = {name: content for name, content in recording.files.items() if "v000003" in name}
    report = replay_blocking(recording, role="inference", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL)
    report.check()
    gone = next(line for line in report.lines() if "versions without weights" in line)
    assert gone.count("v000000.safetensors") == 1 and "3 versions" in gone
    advice = "to compare all of them: fleetbus up --learner-keep-weights 4 (or more), then fleetbus record RUN --weights"
    assert report.advice == advice and advice in "\n".join(report.lines())


def published_in(folder: Path, entry: StreamEntry) -> StreamEntry:
    """The same entry, with weights said to lie in another folder."""
    if entry.subject.split(".")[2] != "policy" or b"PolicyPublished" not in entry.payload:
        return entry
    published = decode(PolicyPublished, entry.payload)
    uri = (folder / published.uri.rpartition("/")[2]).as_uri()
    return msgspec.structs.replace(entry, payload=encode(msgspec.structs.replace(published, uri=uri)))


def test_the_learner_replays_as_recorded() -> None:
    pytest.importorskip("torch")
    report = replay_blocking(
        GUESSING, role="learner", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL, ignored=OTHER_MACHINE
    )
    report.check()
    assert report.compared["StepTrained"] == 3 and report.compared["PolicyPublished"] == 4
    assert report.measured[TRAINING] > 0


@pytest.mark.parametrize("until", ["batches", "weights"])
def test_a_changed_advantage_is_found_and_named(until: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if until == "weights":
        pytest.importorskip("torch")
    original = advantages.ADVANTAGES["grpo"]

    def changed(*arguments: Any, **options: Any) -> Any:
        return np.asarray(original(*arguments, **options)) * 1.01

    monkeypatch.setitem(advantages.ADVANTAGES, "grpo", changed)
    report = replay_blocking(
        GUESSING, role="learner", patience_seconds=SLOW_MACHINE_SECONDS, model=MODEL, ignored=OTHER_MACHINE, until=until
    )
    difference = differing(report)
    assert difference.message == "StepTrained step 1"
    assert difference.field.startswith("metrics.advantage_")


def test_the_same_weights_come_out_twice() -> None:
    """What one machine recorded, the same machine repeats to the last bit: two replays, and the second against the first."""
    pytest.importorskip("torch")
    recording = load_recording(GUESSING)
    first, second = (weights_of(recording) for _ in range(2))
    assert first == second and len(first) == 4


def weights_of(recording: Recording) -> list[str]:
    """The replayed hash of the first tensor per version, as the difference from an impossible one shows it."""
    import tempfile

    import anyio

    from fleetbus.logs.setup import suppress_logs
    from fleetbus.recording.reader import Recording as Kind
    from fleetbus_workers.assembly.trainers import build_trainer_settings
    from fleetbus_workers.learner.torch.trainer import TorchTrainer
    from fleetbus_workers.replay.driver import ReplayContext
    from fleetbus_workers.replay.learner_replay import replay_learner

    assert isinstance(recording, Kind)
    hashes: list[str] = []

    class Watched(TorchTrainer):
        def save_weights(self, file: Path) -> Any:
            manifest = super().save_weights(file)
            if file.parent.name == "weights":
                hashes.append(" ".join(entry.sha256 for entry in manifest))
            return manifest

    async def run(folder: Path) -> Report:
        def make(configuration: Configuration) -> Watched:
            return Watched(MODEL, settings=build_trainer_settings(configuration))

        with suppress_logs():
            context = ReplayContext(recording, Replay(role="learner", ignored=frozenset(OTHER_MACHINE)))
            await replay_learner(context, make, folder=folder)
            return context.report

    with tempfile.TemporaryDirectory() as place:
        anyio.run(run, Path(place)).check()
    return hashes


def copy_of_model(folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(MODEL, folder / "model"))


def differing(report: Report) -> Any:
    """The first difference of a report that has one."""
    assert not report.same and report.first is not None, report.lines()
    with pytest.raises(AssertionError, match="differs in"):
        report.check()
    return report.first
