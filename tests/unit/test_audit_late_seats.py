"""A turn that is played after its episode has ended: its versions are those of its seat's policy."""

from __future__ import annotations

import pytest

from fleetbus.core.audit.episode import EpisodeAudit
from fleetbus.core.audit.findings import Findings
from fleetbus_schemas import Action, Observation, SamplingSettings, VersionSpan
from fleetbus_schemas.tokens import EMPTY_HISTORY, pack_ids, pack_logprobs

PUBLISHED = {"default": {1}, "solver": {7}}


@pytest.mark.parametrize(("version", "found"), [(7, []), (1, ["version_unpublished"])])
def test_a_late_action_of_another_policy_is_held_against_its_versions(version: int, found: list[str]) -> None:
    episode = EpisodeAudit(
        episode_id="e",
        requested=1,
        policy="default",
        others={"b": "solver"},
        sharers=("solver",),
        attempts=1,
        result_sequence=3,
    )
    findings = Findings()
    observation = Observation(
        episode_id="e",
        attempt=1,
        turn=0,
        policy="solver",
        messages=(),
        tools=(),
        sampling=SamplingSettings(),
        tokens_left=9,
        history_hash=EMPTY_HISTORY,
        environment_lane="e0",
        deadline_ns=1,
        seat="b",
    )
    episode.on_observation(4, "solver", observation, findings)
    action = Action(
        episode_id="e",
        attempt=1,
        turn=0,
        prompt_delta=b"",
        sampled=pack_ids([1]),
        logprobs=pack_logprobs([-1.0]),
        text="",
        finish_reason="stop",
        versions=(VersionSpan(version=version, start=0, stop=1),),
        history_hash=b"",
    )
    episode.on_action(5, "e0", action, PUBLISHED.__getitem__, findings)
    assert [finding.kind for finding in findings.list_found()] == found
