"""One environment worker's key stores a result for an episode that another worker plays: nobody takes its verdict."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from fleetbus.auth.access import build_access
from fleetbus.bus.base import Bus
from fleetbus.core.episode.claim_seals import NOT_OF_CLAIM, ClaimSeals, make_seal, name_claim, without_verdict
from fleetbus.core.training.ledger import Ledger
from fleetbus.log.episodes import decode_episode_entry, read_episode_state, scan_training_results
from fleetbus_schemas import ActionReference, AttemptStarted, EpisodeFinished, EpisodeRequested, Task, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.learner.pool import GroupPool
from tests.support.backends import asyncio_alone
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, secured_server

pytestmark = pytest.mark.timeout(120)

anyio_backend = asyncio_alone

SECRET = "5f" * 16
FORMS = {"none": "", "guessed": "00" * 16, "public": name_claim(SECRET), "seal": make_seal(SECRET).hex()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


def result_of(episode: str, **changes: Any) -> EpisodeFinished:
    result = EpisodeFinished(
        episode_id=episode, group_id="g", attempt=1, outcome="completed", worker="honest", reward=1.0,
        actions=(ActionReference(sequence=1, lane="e0", turn=0),),
    )  # fmt: skip
    return msgspec.structs.replace(result, **changes)


async def claim(secured: SecuredServer, episode: str) -> None:
    """An honest worker begins the episode."""
    request = EpisodeRequested(
        episode_id=episode, group_id="g", sample_index=0, split="train", task=Task(key="k"), policy="default", deadline_ns=1
    )
    started = AttemptStarted(
        episode_id=episode, attempt=1, worker="honest", nonce=name_claim(SECRET), lane="e0", seal=make_seal(SECRET)
    )
    async with secured.connect("learner") as learner, secured.connect("environment", worker="honest") as honest:
        await learner.publish(SUBJECTS.task("default", episode), encode(request))
        await honest.publish(SUBJECTS.episode(episode), encode(started), expected_last=0)


async def store(bus: Bus, result: EpisodeFinished) -> None:
    state = await read_episode_state(bus, SUBJECTS, result.episode_id)
    await bus.publish(SUBJECTS.episode(result.episode_id), encode(result), expected_last=state.last_sequence)


@pytest.mark.parametrize("form", FORMS)
async def test_a_forged_verdict_is_stored_and_counts_for_nobody(secured: SecuredServer, form: str) -> None:
    """The server cannot refuse it: the key is the same. In each form that can be had without the secret."""
    episode, pool = f"forged-{form}", GroupPool(Ledger(), minimum=1, max_staleness=1)
    await claim(secured, episode)
    async with secured.connect("environment", worker="thief") as thief:
        await store(thief, result_of(episode, opens=FORMS[form]))
    pool.admit("g", 1)
    pool.expect(episode, "g")
    async with secured.connect("learner") as learner:
        found = [each async for each in scan_training_results(learner, SUBJECTS, start=1) if each[1].episode_id == episode]
        assert [is_of_claim for _, _, is_of_claim in found] == [False]
        pool.add_result(found[0][1], found[0][0], is_of_claim=False)
        seals = ClaimSeals()
        followed = [seals.enter(decode_episode_entry(each)) for each in await learner.history([SUBJECTS.episode(episode)])]
        assert followed == [True, False]
    assert [(each.episode_id, each.reason) for each in pool.take_exclusions()] == [(episode, NOT_OF_CLAIM)]
    assert (without_verdict(found[0][1]).reward, without_verdict(found[0][1]).outcome) == (None, "verifier_unknown")


async def test_the_worker_that_holds_the_claim_decides_and_others_end_it_without_a_verdict(secured: SecuredServer) -> None:
    for episode, result in (
        ("own", result_of("own", opens=SECRET)),
        ("cancelled", result_of("cancelled", outcome="cancelled", reward=None, worker="operator")),
    ):
        await claim(secured, episode)
        async with secured.connect("environment") as honest:
            await store(honest, result)
            seals = ClaimSeals()
            entries = await honest.history([SUBJECTS.episode(episode)])
            assert all(seals.enter(decode_episode_entry(each)) for each in entries)


async def test_the_audit_names_the_episode(secured: SecuredServer, capsys: pytest.CaptureFixture[str]) -> None:
    await claim(secured, "named")
    async with secured.connect("environment") as thief:
        await store(thief, result_of("named"))
    access = build_access("audit", str(secured.folder), TRUST)
    assert access["user"] == "monitor"
    arguments = ["audit", TRUST, "--json", "--nats", secured.server.url, "--nats-auth", str(secured.folder)]
    assert await anyio.to_thread.run_sync(run_program, arguments) == 1
    found = {each["kind"]: each["ids"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "named" in found["result_not_of_claim"] and "own" not in found["result_not_of_claim"]
