"""Episodes of several segments as the trainer is given them: a sequence per leaf, each sampled token trained in one of them."""

from __future__ import annotations

import msgspec
import numpy as np

from fleetbus_schemas import Action, EpisodeFinished, SegmentOrigin, VersionSpan
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask
from fleetbus_workers.learner.base import TrainingSequence
from fleetbus_workers.learner.batches import CreditPlan, build_sequence
from fleetbus_workers.learner.leaves import list_leaves, split_sequence
from fleetbus_workers.learner.training_digest import digest_sequences


def action(turn: int, delta: list[int], sampled: list[int], *, segment: int = 0, origin: SegmentOrigin | None = None) -> Action:
    return Action(
        episode_id="e",
        attempt=1,
        turn=turn,
        text="",
        prompt_delta=pack_ids(delta),
        sampled=pack_ids(sampled),
        logprobs=pack_logprobs([-float(one) for one in sampled]),
        versions=(VersionSpan(version=turn, start=0, stop=len(sampled)),),
        segment=segment,
        origin=origin,
    )


FORK = SegmentOrigin(parent=0, kept=2, reason="history_edited")
ACTIONS = [action(0, [1], [2]), action(1, [3], [4]), action(2, [5], [6, 7], segment=1, origin=FORK)]
RESULT = EpisodeFinished(
    episode_id="e",
    group_id="g",
    attempt=1,
    outcome="completed",
    worker="w",
    tokens=7,
    loss_mask=pack_mask([False, True, False, True, False, True, True]),
)


def build(actions: list[Action], result: EpisodeFinished = RESULT) -> list[TrainingSequence]:
    whole = build_sequence(result, actions, [0.5, 1.0, 2.0][: len(actions)], CreditPlan(), 1.0)
    return split_sequence(whole, list_leaves(actions))


def test_each_leaf_is_a_sequence_and_what_an_earlier_one_trains_is_masked_in_it() -> None:
    first, second = build(ACTIONS)
    assert (first.segment, first.ids.tolist(), first.loss_mask.tolist()) == (0, [1, 2, 3, 4], [False, True, False, True])
    assert (second.segment, second.ids.tolist()) == (1, [1, 2, 5, 6, 7])
    assert second.loss_mask.tolist() == [False, False, False, True, True]
    assert second.logprobs.tolist() == [0, 0, 0, -6, -7]
    assert second.versions.tolist() == [-1, -1, -1, 2, 2]
    assert second.advantages.tolist() == [0, 0, 0, 2, 2]


def test_an_episode_of_one_segment_is_the_sequence_that_it_always_was() -> None:
    result = EpisodeFinished(
        episode_id="e", group_id="g", attempt=1, outcome="completed", worker="w", tokens=4, loss_mask=bytes([0b1010])
    )
    whole = build_sequence(result, ACTIONS[:2], [0.5, 1.0], CreditPlan(), 1.0)
    (sequence,) = split_sequence(whole, list_leaves(ACTIONS[:2]))
    assert sequence is whole


def test_the_digest_of_an_episode_tells_of_each_of_its_leaves() -> None:
    leaves = build(ACTIONS)
    assert set(digest_sequences(leaves)) == {"e"}
    doubled = leaves[1].loss_mask.copy()
    doubled[1] = True
    forged = msgspec.structs.replace(leaves[1], loss_mask=doubled)
    digests = {digest_sequences(each)["e"] for each in ([leaves[0]], leaves, [leaves[0], forged], leaves[::-1])}
    assert len(digests) == 4


def test_every_sampled_token_is_trained_once() -> None:
    trained = np.concatenate([each.ids[each.loss_mask] for each in build(ACTIONS)])
    assert sorted(trained.tolist()) == [2, 4, 6, 7]
