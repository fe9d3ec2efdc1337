"""A result and Actions that do not fit each other: the episode is left out, with a reason."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleetbus.bus.base import StreamEntry
from fleetbus.bus.memory import MemoryBus, MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.concurrency.runtime import Runtime
from fleetbus.core.episode.result_checks import find_actions_problem
from fleetbus.core.training.groups import Group
from fleetbus.log.actions import read_actions
from fleetbus_schemas import (
    NEW_ROOT,
    Action,
    ActionReference,
    EpisodeFinished,
    EpisodeSeat,
    Exclusion,
    SegmentOrigin,
    ShownImage,
    Subjects,
    VersionSpan,
    encode,
)
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history, pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.images.reader import ImageMismatch, ImageReader
from fleetbus_workers.learner.batches import CreditPlan, read_sequences
from fleetbus_workers.learner.scripted import ScriptedTrainer
from tests.support.bucket import Bucket

pytestmark = pytest.mark.anyio

SUBJECTS = Subjects("checks")
SPAN = VersionSpan(version=3, start=0, stop=2)


def action(turn: int, episode: str = "e", /, **changed: Any) -> Action:
    """Three ids of a prompt and two sampled ones."""
    return msgspec.structs.replace(
        Action(
            episode_id=episode,
            attempt=1,
            turn=turn,
            text="t",
            prompt_delta=pack_ids([5, 6, 7]),
            sampled=pack_ids([8, 9]),
            logprobs=pack_logprobs([-1.0, -2.0]),
            versions=(SPAN,),
        ),
        **changed,
    )


def finished(episode: str = "e", **changed: Any) -> EpisodeFinished:
    """Of two such turns, whose Actions stand at 1 and 2."""
    return msgspec.structs.replace(
        EpisodeFinished(
            episode_id=episode,
            group_id="g",
            attempt=1,
            outcome="completed",
            worker="w",
            reward=1.0,
            turns=2,
            tokens=10,
            loss_mask=pack_mask([False, False, False, True, True] * 2),
            policy_versions=(3,),
            actions=tuple(ActionReference(sequence=turn + 1, lane="e0", turn=turn) for turn in range(2)),
        ),
        **changed,
    )


BROKEN_ACTIONS: dict[str, dict[str, Any]] = {
    "is that of turn 0": {"turn": 0},
    "of episode other": {"episode_id": "other"},
    "no whole numbers": {"prompt_delta": b"123"},
    "bytes of log-probabilities": {"logprobs": pack_logprobs([-1.0])},
    "not finite": {"logprobs": pack_logprobs([-1.0, math.nan])},
    "token id 4294967295 is not below 2147483648": {"sampled": pack_ids([8, 2**32 - 1])},
    "policy versions": {"versions": (VersionSpan(version=2**31, start=0, stop=2),)},
    "images": {"images": (ShownImage(object="o", start=1, stop=4),)},
    "begins without a prompt": {
        "prompt_delta": b"",
        "segment": 1,
        "origin": SegmentOrigin(parent=0, kept=0, reason="history_edited"),
    },
}
BROKEN_RESULTS: list[dict[str, Any]] = [
    {"tokens": 9},
    {"tokens": -1},
    {"tokens": 2**62},
    {"loss_mask": b""},
    {"loss_mask": b"\xff\xff"},
    {"loss_mask": pack_mask([True] * 5 + [False, False, False, True, True])},
]
"""Of the second turn's Action, or of the result."""


def test_what_workers_store_has_no_problem() -> None:
    assert not find_actions_problem(finished(), [action(0), action(1)])
    assert not find_actions_problem(finished(), [action(0), action(1)], vocabulary=10)


@pytest.mark.parametrize("named", BROKEN_ACTIONS)
def test_an_action_that_cannot_be_trained_is_named_with_its_turn(named: str) -> None:
    problem = find_actions_problem(finished(), [action(0), action(1, **BROKEN_ACTIONS[named])])
    assert problem.startswith("turn 1: ")
    assert named in problem


@pytest.mark.parametrize("versions", [(), (100,)])
def test_a_result_that_names_other_versions_than_its_actions_have_is_a_problem(versions: tuple[int, ...]) -> None:
    problem = find_actions_problem(finished(policy_versions=versions), [action(0), action(1)])
    assert problem == f"the result names the versions {list(versions)}, its Actions [3]"
    assert not find_actions_problem(finished(policy_versions=(2, 3)), [action(0), action(1)])


def test_a_seat_of_another_policy_names_its_versions_itself() -> None:
    seats = (
        EpisodeSeat(name="mine", turns=(0,), reward=1.0),
        EpisodeSeat(name="other", turns=(1,), reward=0.0, policy="other", versions=(7,)),
    )
    other = action(
        1,
        segment=1,
        origin=SegmentOrigin(parent=NEW_ROOT, kept=0, reason="sub_agent"),
        versions=(VersionSpan(version=7, start=0, stop=2),),
    )
    assert not find_actions_problem(finished(seats=seats), [action(0), other])


def test_turns_that_were_sampled_after_another_answer_are_no_history() -> None:
    def follow(history: bytes, one: Action) -> Action:
        return msgspec.structs.replace(one, history_hash=extend_history(history, one.prompt_delta, one.sampled))

    first, other = follow(EMPTY_HISTORY, action(0)), follow(EMPTY_HISTORY, action(0, sampled=pack_ids([1, 2])))
    assert not find_actions_problem(finished(), [first, follow(first.history_hash, action(1))])
    problem = find_actions_problem(finished(), [first, follow(other.history_hash, action(1))])
    assert problem == "turn 1: it was sampled after another history"


def test_a_segment_that_keeps_another_attempts_tokens_is_no_history() -> None:
    def keep(kept: list[int]) -> Action:
        start = extend_history(EMPTY_HISTORY, pack_ids(kept), b"")
        one = action(1, segment=1, origin=SegmentOrigin(parent=0, kept=4, reason="history_edited"))
        return msgspec.structs.replace(one, history_hash=extend_history(start, one.prompt_delta, one.sampled))

    assert not find_actions_problem(finished(), [action(0), keep([5, 6, 7, 8])])
    assert "sampled after another history" in find_actions_problem(finished(), [action(0), keep([5, 6, 7, 1])])


def test_a_seat_that_names_other_versions_than_its_actions_have_is_a_problem() -> None:
    def seated(*versions: int) -> EpisodeFinished:
        seats = (
            EpisodeSeat(name="mine", turns=(0,), reward=1.0),
            EpisodeSeat(name="other", turns=(1,), reward=1.0, policy="p"),
        )
        return finished(seats=(seats[0], msgspec.structs.replace(seats[1], versions=versions)))

    turns = [action(0), action(1, segment=1, origin=SegmentOrigin(parent=NEW_ROOT, kept=0, reason="seat"))]
    assert not find_actions_problem(seated(SPAN.version), turns)
    assert "names the versions" in find_actions_problem(seated(SPAN.version + 1), turns)


def test_a_first_turn_without_a_prompt_and_ids_beyond_the_vocabulary_are_problems() -> None:
    assert "begins without a prompt" in find_actions_problem(finished(), [action(0, prompt_delta=b""), action(1)])
    assert "token id 9 is not below 9" in find_actions_problem(finished(), [action(0), action(1)], vocabulary=9)


@pytest.mark.parametrize("changed", BROKEN_RESULTS)
def test_a_result_that_counts_other_tokens_than_its_actions_have_is_a_problem(changed: dict[str, Any]) -> None:
    assert "its mask is not that of the 10 of its Actions" in find_actions_problem(finished(**changed), [action(0), action(1)])


async def store(bus: MemoryBus, actions: list[Action]) -> None:
    for each in actions:
        await bus.publish(SUBJECTS.action("e0", each.episode_id), encode(each))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *((changed, "actions_broken") for changed in BROKEN_RESULTS),
        ({"actions": (ActionReference(sequence=1, lane="> b", turn=0),)}, "actions_lost"),
        ({"actions": (ActionReference(sequence=-1, lane="e0", turn=0),)}, "actions_lost"),
        ({"actions": tuple(ActionReference(sequence=1, lane=f"e{n}", turn=0) for n in range(600))}, "actions_lost"),
        ({"actions": finished().actions + finished().actions[:1]}, "actions_broken"),
        ({"actions": finished().actions[::-1]}, "actions_broken"),
    ],
)
async def test_an_episode_whose_result_does_not_fit_its_actions_leaves_its_group_and_the_others_are_trained(
    changed: dict[str, Any], reason: str
) -> None:
    """Each of these ended the learner, and every learner after it."""
    async with MemoryServer().connect("checks") as bus:
        await bus.declare(plan_run("checks", lanes=1))
        await store(bus, [action(0), action(1), action(0, "f"), action(1, "f")])
        others = tuple(ActionReference(sequence=turn + 3, lane="e0", turn=turn) for turn in range(2))
        group = Group(group_id="g", size=2, results={"e": finished(**changed), "f": finished("f", actions=others, reward=0.0)})
        sequences = await read_sequences(bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, runtime=Runtime())
    assert group.excluded == [Exclusion(episode_id="e", reason=reason)]
    assert [sequence.episode_id for sequence in sequences] == ["f"]


async def test_a_batch_is_read_once_however_many_of_its_episodes_name_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, each with a read of all and seconds for a replica that lags, a step would take minutes."""
    monkeypatch.setattr("fleetbus.log.actions.LAG_PAUSES_SECONDS", (0.0,))
    async with MemoryServer().connect("checks") as bus:
        await bus.declare(plan_run("checks", lanes=1))
        await store(bus, [action(0, "f"), action(1, "f")])
        read, history = list[str](), bus.history

        async def read_and_count(subjects: Sequence[str]) -> list[StreamEntry]:
            read.extend(subjects)
            return await history(subjects)

        monkeypatch.setattr(bus, "history", read_and_count)
        names = {f"e{number}": ActionReference(sequence=1 + number % 2 * 98, lane="e0", turn=0) for number in range(9)}
        broken = {name: finished(name, actions=(reference,)) for name, reference in names.items()}
        group = Group(group_id="g", size=10, results=broken | {"f": finished("f")})
        sequences = await read_sequences(bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, runtime=Runtime())
    assert [sequence.episode_id for sequence in sequences] == ["f"]
    assert [exclusion.reason for exclusion in group.excluded] == ["actions_lost"] * 9
    assert read.count(SUBJECTS.action("e0", "f")) == 2, "once, and once more in case that a replica lagged"


@pytest.mark.integration
async def test_an_action_that_was_trimmed_before_the_request_was_made_ends_no_learner() -> None:
    """No archive can have it: it is none of this episode."""
    async with MemoryServer().connect("checks") as bus:
        await bus.declare(plan_run("checks", lanes=1))
        await store(bus, [action(0), action(1)])
        await bus.purge(SUBJECTS.actions(), below=3)
        group = Group(group_id="g", size=1, results={"e": finished(request_sequence=2)})
        assert await read_sequences(bus, SUBJECTS, [group], plan=CreditPlan(), temperature=1.0, runtime=Runtime()) == []
    assert group.excluded == [Exclusion(episode_id="e", reason="actions_lost")]


async def test_actions_of_a_result_are_read_from_as_many_lanes_as_attempts_had() -> None:
    async with MemoryServer().connect("checks") as bus:
        await bus.declare(plan_run("checks", lanes=2))
        await bus.publish(SUBJECTS.action("e0", "e"), encode(action(0)))
        await bus.publish(SUBJECTS.action("e1", "e"), encode(action(1)))
        references = (ActionReference(sequence=1, lane="e0", turn=0), ActionReference(sequence=2, lane="e1", turn=1))
        found = await read_actions(bus, SUBJECTS, [finished(actions=references)], archive=None, runtime=Runtime())
    assert [each.turn for each in found["e"]] == [0, 1]


class Narrow(ScriptedTrainer):
    """Takes few ids, and no image of the episode ``e``."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def check_images(self, episode_id: str, ids: NDArray[np.int32], images: Sequence[PlacedImage]) -> None:
        if episode_id == "e":
            raise ImageMismatch("1 token here and 2 in the history")


@pytest.mark.parametrize(("vocabulary", "reason"), [(10, "image_mismatch"), (9, "actions_broken")])
async def test_an_episode_that_the_trainer_cannot_be_given_leaves_its_group(vocabulary: int, reason: str) -> None:
    name = hashlib.sha256(b"image").hexdigest()
    shown = (ShownImage(object=name, start=0, stop=1),)
    small = pack_ids([8, 8])
    async with MemoryServer().connect("checks") as bus:
        await bus.declare(plan_run("checks", lanes=1))
        await store(bus, [action(0, images=shown), action(1)])
        await store(bus, [action(turn, "f", images=shown, sampled=small) for turn in range(2)])
        others = tuple(ActionReference(sequence=turn + 3, lane="e0", turn=turn) for turn in range(2))
        group = Group(group_id="g", size=2, results={"e": finished(), "f": finished("f", actions=others)})
        sequences = await read_sequences(
            bus,
            SUBJECTS,
            [group],
            plan=CreditPlan(),
            temperature=1.0,
            images=ImageReader(Bucket({name: b"image"})),
            trainer=Narrow(vocabulary),
        )
    assert group.excluded == [Exclusion(episode_id="e", reason=reason)]
    assert [(sequence.episode_id, len(sequence.images)) for sequence in sequences] == [("f", 2)]
