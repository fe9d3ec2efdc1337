"""Episodes with the same task, actions and outcome are played once, and a change is found all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fleetbus.recording import Recording, load_recording
from fleetbus_schemas import EpisodeFinished, EpisodeSeat, Observation, decode, encode
from fleetbus_workers.replay.deduplicate import remove_duplicates
from fleetbus_workers.replay.fixtures import replay_blocking
from fleetbus_workers.replay.recorded_episode import read_episodes
from fleetbus_workers.replay.report import Report

HERE = Path(__file__).parent
WAREHOUSE = HERE / "recordings" / "warehouse.fbrec"


def with_duplicates() -> Recording:
    """The recording with each of its episodes a second time, under another name."""
    recording = load_recording(WAREHOUSE)
    last = recording.entries[-1].sequence
    for entry in list(recording.entries):
        episode = entry.subject.rpartition(".")[2]
        if entry.subject.split(".")[2] not in ("task", "obs", "act", "episode"):
            continue
        content = msgspec.msgpack.decode(entry.payload)
        content |= {"episode_id": f"{episode}-duplicate"}
        content |= {"request_sequence": content["request_sequence"] + last} if "request_sequence" in content else {}
        payload = msgspec.msgpack.encode(content)
        if content["type"] == "EpisodeFinished":
            result = decode(EpisodeFinished, payload)
            actions = tuple(msgspec.structs.replace(each, sequence=each.sequence + last) for each in result.actions)
            payload = encode(msgspec.structs.replace(result, actions=actions))
        duplicate = msgspec.structs.replace(
            entry,
            sequence=entry.sequence + last,
            subject=f"{entry.subject}-duplicate",
            payload=payload,
        )
        recording.entries.append(duplicate)
    return recording


def distinct(recording: Recording) -> tuple[list[str], Report]:
    report = Report(role="environment")
    found = remove_duplicates(read_episodes(recording.entries).values(), report)
    return [episode.episode_id for episode in found], report


def test_duplicates_are_left_out_and_counted() -> None:
    recording = with_duplicates()
    alone, _ = distinct(load_recording(WAREHOUSE))
    found, report = distinct(recording)
    assert found == alone
    assert sum(report.notes.values()) == 2 * 17 - len(found)


def test_a_duplicate_of_which_something_else_came_is_played() -> None:
    recording = with_duplicates()
    before, _ = distinct(recording)
    changed = ""
    for index, entry in enumerate(recording.entries):
        if entry.subject.endswith("-duplicate") and b"EpisodeFinished" in entry.payload:
            result = decode(EpisodeFinished, entry.payload)
            assert result.reward is not None
            payload = encode(msgspec.structs.replace(result, reward=result.reward + 0.25))
            recording.entries[index] = msgspec.structs.replace(entry, payload=payload)
            changed = result.episode_id
            break
    found, _ = distinct(recording)
    assert set(found) == {*before, changed}
    difference = replay_blocking(recording, distinct=True).first
    assert difference is not None and (difference.field, difference.episode_id) == ("reward", changed)


def test_an_episode_in_which_a_seat_was_worth_something_else_is_no_duplicate() -> None:
    first, again = list(read_episodes(with_duplicates().entries).values())[:2]
    assert first.result is not None
    for reward, count in ((1.0, 1), (0.5, 2)):
        first.result, again.result = (
            msgspec.structs.replace(first.result, seats=(EpisodeSeat(name="first", turns=(0,), reward=each),))
            for each in (1.0, reward)
        )
        again.request, again.turns = first.request, first.turns
        assert len(list(remove_duplicates((first, again), Report(role="environment")))) == count


def test_a_planted_change_is_found_though_few_episodes_are_played() -> None:
    recording = with_duplicates()
    report = replay_blocking(recording, distinct=True)
    report.check()
    assert report.compared["EpisodeFinished"] < 2 * 17
    for index, entry in enumerate(recording.entries):
        if entry.subject.split(".")[2] == "obs" and (observation := decode(Observation, entry.payload)).turn == 1:
            said: Any = observation.messages[0].content
            message = msgspec.structs.replace(observation.messages[0], content=f"{said}!")
            payload = encode(msgspec.structs.replace(observation, messages=(message,)))
            recording.entries[index] = msgspec.structs.replace(entry, payload=payload)
            break
    difference = replay_blocking(recording, distinct=True).first
    assert difference is not None and difference.field == "messages[0].content"
