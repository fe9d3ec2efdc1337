"""Recorded tokens are taken as sampled only upon proof: what a forward pass does not show is sampled, what differs is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetbus.recording import load_recording
from fleetbus_schemas import Action, decode, encode
from fleetbus_schemas.tokens import pack_logprobs, unpack_ids, unpack_logprobs
from fleetbus_workers.replay import Report
from fleetbus_workers.replay.fixtures import replay_blocking

HERE = Path(__file__).parent
GUESSING = HERE / "recordings" / "guessing.fbrec"
MODEL = HERE / "recordings" / "model"
PROVED, SAMPLED = "turns that a forward pass showed to be sampled so", "turns sampled again"

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)


def replayed(source: Any = GUESSING, **choices: Any) -> Report:
    return replay_blocking(source, role="inference", model=MODEL, patience_seconds=200.0, **choices)


def test_a_forward_pass_shows_what_was_sampled_and_little_is_sampled_again() -> None:
    report = replayed()
    report.check()
    assert report.notes[PROVED] + report.notes[SAMPLED] == 66
    assert report.notes[PROVED] >= 55, "another machine may add up otherwise at a few places"
    assert report.checked.startswith("tokens are those that the sampler chooses")
    assert replayed(sample_again=True).checked == "every token was sampled again"


def first_action(change: Any) -> Any:
    """The recording with its first Action of turn 0 changed."""
    recording = load_recording(GUESSING)
    for index, entry in enumerate(recording.entries):
        if entry.subject.split(".")[2] == "act":
            action = change(decode(Action, entry.payload))
            recording.entries[index] = msgspec.structs.replace(entry, payload=encode(action))
            return recording
    raise AssertionError("no action")


def test_a_recorded_token_that_no_sampler_chose_is_found_and_named() -> None:
    def change(action: Action) -> Action:
        ids = np.frombuffer(action.sampled, "<u4").copy()
        ids[1] = (ids[1] + 1) % 100
        return msgspec.structs.replace(action, sampled=ids.tobytes())

    report = replayed(first_action(change))
    assert report.first is not None and report.first.field == "sampled[1]"
    assert report.notes[SAMPLED] >= 1


def test_a_recorded_log_probability_that_is_off_is_found_and_named() -> None:
    def change(action: Action) -> Action:
        logprobs = unpack_logprobs(action.logprobs)
        return msgspec.structs.replace(action, logprobs=pack_logprobs([logprobs[0] - 0.01, *logprobs[1:]]))

    report = replayed(first_action(change))
    assert report.first is not None and report.first.field == "logprobs[0]"


def test_a_recorded_end_that_the_sampler_would_not_make_is_found_and_named() -> None:
    def change(action: Action) -> Action:
        ids, logprobs = unpack_ids(action.sampled), unpack_logprobs(action.logprobs)
        spans = tuple(msgspec.structs.replace(span, stop=len(ids) - 1) for span in action.versions)
        cut = {"sampled": action.sampled[:-4], "logprobs": pack_logprobs(logprobs[:-1]), "versions": spans}
        return msgspec.structs.replace(action, **cut)

    report = replayed(first_action(change))
    assert report.first is not None and report.first.field.startswith(("sampled", "finish_reason"))


def test_an_engine_that_broke_is_found_by_the_turns_that_it_samples_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetbus_workers.inference.torch import engine

    def chosen_otherwise(*arguments: Any) -> Any:
        ids, logprobs = engine_choose(*arguments)
        return [(token + 1) % 100 for token in ids], logprobs

    engine_choose = engine.sample_tokens  # type: ignore[attr-defined]
    monkeypatch.setattr(engine, "sample_tokens", chosen_otherwise)
    report = replayed()
    assert report.notes[PROVED] > report.notes[SAMPLED] >= 3, "one of each version that sampled"
    assert report.first is not None and report.first.field.startswith("sampled")


def test_another_seed_is_found_by_the_tokens_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetbus_workers.inference.observation_handler.compute_turn_seed", lambda observation: 12345)
    report = replayed()
    assert report.first is not None and report.first.field.startswith("sampled")
    assert report.notes[PROVED] == 0


def test_another_way_of_choosing_is_found_by_the_tokens_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetbus_workers.inference.torch import turn

    class Other(random.Random):
        def getrandbits(self, bits: int) -> int:
            return super().getrandbits(bits) ^ 1 << (bits - 1)

    monkeypatch.setattr(turn.random, "Random", Other)  # type: ignore[attr-defined]
    report = replayed()
    assert report.first is not None and report.first.field.startswith("sampled")


@pytest.mark.parametrize(("number", "recorded", "taken"), [(0.5, 0, 0), (0.5, 1, 1), (0.5, 2, 2), (0.4, 2, 0), (0.6, 0, 2)])
def test_a_token_next_to_the_number_that_was_drawn_is_as_good_as_the_one_that_rounding_chose(
    number: float, recorded: int, taken: int
) -> None:
    from fleetbus_schemas import SamplingSettings
    from fleetbus_workers.replay.scoring import sample_tokens_near

    logits = torch.tensor([[0.5, 1e-6, 0.5]]).log()
    ids, logprobs = sample_tokens_near(logits, np.array([number], np.float32), [SamplingSettings()], [recorded])
    assert ids == [taken]
    assert logprobs == pytest.approx([float(logits.log_softmax(-1)[0, taken])])
