"""An episode is a success if its environment says so; its reward decides where the environment says nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fleetbus.core.training.evaluation_summary import is_success, success_in, summarise_results
from fleetbus.core.training.groups import Group
from fleetbus_schemas import ActionReference, ChatMessage, EpisodeFinished, Image, Text
from fleetbus_workers.environment.normalization import clip_values, format_text
from fleetbus_workers.learner.batch_metrics import compute_group_metrics
from fleetbus_workers.replay.compare import first_difference

RESULT = EpisodeFinished(
    episode_id="e",
    group_id="g",
    attempt=1,
    outcome="completed",
    worker="w",
    reward=0.3,
    actions=(ActionReference(sequence=1, lane="e1", turn=0),),
)


def told(success: bool | None, reward: float) -> EpisodeFinished:
    return msgspec.structs.replace(RESULT, episode_id=f"{success}{reward}", success=success, reward=reward)


@pytest.mark.parametrize(
    ("info", "success"),
    [({"success": True}, True), ({"is_success": 0.0}, False), ({}, None), ({"success": "yes"}, None)],
)
def test_success_is_read_from_what_environments_call_it(info: dict[str, object], success: bool | None) -> None:
    assert success_in(info) is success


def test_the_environment_s_word_counts_and_the_reward_where_there_is_none() -> None:
    results = [told(True, 0.3), told(False, 7.0), told(None, 1.0), told(None, 0.9)]
    assert [*map(is_success, results)] == [True, False, True, False]
    assert summarise_results(results, [1]).success == 0.5
    group = Group(group_id="g", size=4)
    for result in results:
        group.add(result)
    assert compute_group_metrics([group], [0])["success"] == 0.5


def test_what_is_told_beside_an_observation_is_cut_by_whole_entries() -> None:
    info = {"success": np.bool_(True), "text": "x" * 5000, "huge": 1 << 80, "odd": "\ud800", "position": np.arange(2)}
    assert clip_values(info, 100) == {"success": True, "position": [0, 1]}


def test_an_observation_in_words_has_one_for_each_image() -> None:
    picture = Image(object="h", media_type="image/png", width=4, height=3)
    assert format_text([ChatMessage(role="user", content=(Text(text="see "), picture))]) == "see [image, 4x3]"


def test_a_recording_from_before_is_not_held_against_what_is_told_now() -> None:
    now = msgspec.structs.replace(RESULT, success=True, info={"success": True}, last_observation="at 2")
    assert first_difference(RESULT, now) is None
    other = msgspec.structs.replace(now, last_observation="at 3")
    found = first_difference(now, other)
    assert found is not None
    assert found.field == "last_observation"
