"""The token record: written before the log names it, believed if the log knows it, and joined with an episode's tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.episodes import read_transcript
from fleetbus.recording.rows import build_token_row
from fleetbus.recording.token_record import (
    TrainedTokens,
    build_record_path,
    find_differing,
    read_record,
    split_by_turn,
    spread_over,
)
from fleetbus.recording.trained_tokens import TrainedTokensIndex
from fleetbus_schemas import LineageStarted, StepTrained, encode
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask, unpack_logprobs
from fleetbus_workers.cli.look.transcript import print_transcript
from fleetbus_workers.learner.base import SequenceTokens
from fleetbus_workers.learner.token_records import TokenRecords
from fleetbus_workers.observe.monitor.episode_view import describe_action
from fleetbus_workers.observe.monitor.token_decoder import TokenDecoder
from tests.support.log_builder import PROMPT, SAMPLED, SUBJECTS, LogBuilder, read_entries


def tokens_of(episode: str, places: list[int], value: float = -0.5) -> SequenceTokens:
    count = len(places)
    return SequenceTokens(
        episode_id=episode,
        places=np.array(places),
        logprobs=np.full(count, value, np.float32),
        gradients=np.full(count, 0.25, np.float32),
        clipped=np.arange(count) == 0,
    )


def index_of(log: LogBuilder, folder: Path) -> TrainedTokensIndex:
    index = TrainedTokensIndex(folder)
    for entry in read_entries(log):
        if entry.subject.split(".")[2] == "train":
            index.add(entry)
    return index


def test_a_record_is_read_by_the_digest_that_the_log_has_and_by_no_other(tmp_path: Path) -> None:
    digest = TokenRecords(tmp_path / "tokens", keep=5).write("l1", 3, [tokens_of("a", [4, 5]), tokens_of("b", [4])], version=4)
    file = build_record_path(tmp_path / "tokens", "l1", 3)

    record = read_record(file, digest)
    assert record is not None and [each.episode_id for each in record.episodes] == ["a", "b"]
    assert read_record(file, bytes(16)) is None
    file.write_bytes(file.read_bytes()[:-1])
    assert read_record(file, digest) is None
    file.unlink()
    assert read_record(file, digest) is None


def test_the_leaves_of_an_episode_are_one_entry(tmp_path: Path) -> None:
    digest = TokenRecords(tmp_path, keep=5).write(
        "l1", 1, [tokens_of("a", [1]), tokens_of("b", [9]), tokens_of("a", [3, 2])], version=4
    )

    record = read_record(build_record_path(tmp_path, "l1", 1), digest)

    assert record is not None
    first, _ = record.episodes
    columns = spread_over(first, 5)
    assert [not math.isnan(value) for value in columns.logprobs] == [False, True, True, True, False]
    assert columns.clipped == [False, True, False, True, False]


def test_the_tokens_of_an_episode_are_those_of_all_policies_that_were_trained_on_it(tmp_path: Path) -> None:
    log, own, other = LogBuilder(), tmp_path / "tokens", tmp_path / "policies" / "solver" / "tokens"
    for policy, folder, places, value in (("default", own, [4, 5], -0.5), ("solver", other, [9], -2.0)):
        digest = TokenRecords(folder, keep=5).write("l1", 1, [tokens_of("a", places, value)], version=4)
        log.add(SUBJECTS.train(policy), LineageStarted(lineage="l1", worker="w"))
        step = StepTrained(lineage="l1", step=1, version=1, episodes=("a",), token_record=digest)
        log.add(SUBJECTS.train(policy), step)
    found = index_of(log, own).find("a")
    assert found is not None
    columns = spread_over(found, 10)
    known = {place: value for place, value in enumerate(columns.logprobs) if not math.isnan(value)}
    assert known == {4: -0.5, 5: -0.5, 9: -2.0}
    assert [place for place, clipped in enumerate(columns.clipped) if clipped] == [4, 9]


def test_records_of_steps_long_past_are_removed_whatever_their_lineage(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path, keep=2)
    for lineage, step in (("l1", 1), ("l1", 2), ("l1", 3), ("l2", 2), ("l2", 3), ("l2", 4)):
        records.write(lineage, step, [tokens_of("a", [1])], version=4)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["l1-s3.fbtokens", "l2-s3.fbtokens", "l2-s4.fbtokens"]


def test_a_record_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a file where the folder should be")

    assert TokenRecords(tmp_path / "tokens", keep=2).write("l1", 1, [tokens_of("a", [1])], version=4) == b""
    assert TokenRecords(tmp_path / "none", keep=0).write("l1", 1, [tokens_of("a", [1])], version=4) == b""
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("lineage", ["\0", "../" * 40, "x" * 300, "*"])
def test_a_lineage_of_any_name_has_no_record_and_hurts_nobody(tmp_path: Path, lineage: str) -> None:
    log = LogBuilder()
    log.lineage(lineage)
    log.step(1, ["a"], lineage=lineage, token_record=bytes(16))

    assert index_of(log, tmp_path).find("a") is None


def test_what_cannot_be_removed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "l1-s\u00b2.fbtokens").touch()
    (tmp_path / "l1-s2.fbtokens").mkdir()

    assert TokenRecords(tmp_path, keep=1).write("l1", 9, [tokens_of("a", [1])], version=4)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_episode_has_the_record_of_the_lineage_that_counts(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path, keep=9)
    log = LogBuilder()
    log.lineage("l1")
    log.step(1, ["a"], token_record=records.write("l1", 1, [tokens_of("a", [3], -1.0)], version=4))
    log.step(2, ["b"], token_record=records.write("l1", 2, [tokens_of("b", [3], -1.0)], version=4))
    log.lineage("l2", parent="l1", parent_step=1)
    log.step(2, ["b"], lineage="l2", token_record=records.write("l2", 2, [tokens_of("b", [3], -2.0)], version=4))
    log.step(3, ["c"], lineage="l2")

    index = index_of(log, tmp_path)

    found = {episode: index.find(episode) for episode in "abcd"}
    assert found["c"] is None and found["d"] is None
    values = [spread_over(found[episode], 4).logprobs[3] for episode in "ab"]  # type: ignore[arg-type]
    assert values == [-1.0, -2.0]


def test_a_row_of_tokens_has_both_log_probabilities_side_by_side(tmp_path: Path) -> None:
    log = LogBuilder()
    log.play("a", turns=2)
    length = 2 * (PROMPT + SAMPLED)
    places = [PROMPT, PROMPT + 1, length - 2, length - 1]
    trained = TrainedTokens(
        "a",
        4,
        pack_ids(places),
        pack_logprobs([-1.0, -2.0, -3.0, -4.0]),
        pack_logprobs([0.5] * 4),
        pack_mask([False] * 3 + [True]),
    )
    transcript = read_transcript(read_entries(log))

    row, bare = build_token_row(transcript, trained), build_token_row(transcript)

    assert [place for place, value in enumerate(row.trainer_logprobs) if not math.isnan(value)] == places
    assert [own for own, mask in zip(row.trainer_logprobs, row.mask, strict=True) if mask] == [-1.0, -2.0, -3.0, -4.0]
    assert sum(row.clipped) == 1 and row.clipped[-1] and len(row.gradients) == len(row.ids) and row.trained_version == 4
    assert bare.trainer_logprobs == bare.gradients == bare.clipped == ()
    by_turn = split_by_turn(trained, [turn.action for turn in transcript.turns])
    assert [columns.logprobs for columns in by_turn] == [[-1.0, -2.0], [-3.0, -4.0]]


def test_tokens_upon_which_sampler_and_trainer_do_not_agree_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_differing([-1.0, -2.0, -3.0], [-1.05, -2.2]) == [False, True]
    assert find_differing([-1.0, -2.0], [math.nan, -1.8]) == [False, True]
    log = LogBuilder()
    log.play("a", turns=1)
    transcript = read_transcript(read_entries(log))
    (action,) = [turn.action for turn in transcript.turns if turn.action is not None]
    own = unpack_logprobs(action.logprobs)
    values = [own[0], *(value - 0.5 for value in own[1:])]
    places = [PROMPT + place for place in range(SAMPLED)]
    trained = TrainedTokens(
        "a", 4, pack_ids(places), pack_logprobs(values), pack_logprobs([0.0] * SAMPLED), pack_mask([False] * SAMPLED)
    )
    print_transcript(transcript, "a", tokens=True, trained=trained)
    printed = capsys.readouterr().out
    assert f"as {SAMPLED - 1} do" in printed and printed.count("e+00!") == SAMPLED - 1
    facts = describe_action(action, TokenDecoder(), split_by_turn(trained, [action])[0])
    assert facts["differing"] == list(range(1, SAMPLED)) and facts["trainer"]["clipped"] == [False] * SAMPLED
    assert describe_action(action, TokenDecoder())["trainer"] is None


def test_an_index_forgets_the_episodes_that_were_trained_first(tmp_path: Path) -> None:
    steps = [StepTrained(lineage="l1", step=n, version=n, episodes=(f"e{n}",), token_record=bytes(16)) for n in range(5)]
    index = TrainedTokensIndex(tmp_path, max_episodes=2)
    for number, step in enumerate(steps, 1):
        index.add(StreamEntry(sequence=number, subject=SUBJECTS.train("default"), payload=encode(step), time_ns=1))
    assert [*index._records] == ["e3", "e4"]


@pytest.mark.parametrize("count", [0, 3])
def test_places_beyond_an_episode_are_left_out(count: int) -> None:
    trained = TrainedTokens(
        "a", 4, pack_ids([2, 7]), pack_logprobs([-1.0, -2.0]), pack_logprobs([0.0, 0.0]), pack_mask([True, True])
    )

    columns = spread_over(trained, count)

    assert len(columns.logprobs) == len(columns.gradients) == len(columns.clipped) == count
    assert sum(not math.isnan(value) for value in columns.logprobs) == (1 if count else 0)
