"""One key takes what it can of a server that others work with: subscriptions, large messages, filters without end, images."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import anyio
import pytest

from fleetbus.auth import server_config
from fleetbus.auth.permissions import build_inbox_prefix
from fleetbus.bus.objects import ObjectMissing, get_content, images_bucket, put_content, weights_bucket
from fleetbus_workers.weights.store import get_every_object, get_image_store, get_object_store
from tests.support.backends import asyncio_alone
from tests.support.bare_client import BareClient, bare_client, describe_state
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, scan, secured_server

pytestmark = pytest.mark.timeout(120)

anyio_backend = asyncio_alone

MOST = 64
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(1 << 18)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_config, "SUBSCRIPTIONS", MOST)
        patched.setattr(server_config, "LEAF_SUBSCRIPTIONS", MOST)
        with secured_server(tmp_path_factory) as server:
            yield server


@pytest.mark.parametrize("user", ["operator", "environment", "inference", "learner", "recorder", "gateway", "monitor"])
async def test_a_connection_with_too_many_subscriptions_is_cut_and_others_go_on(secured: SecuredServer, user: str) -> None:
    with anyio.fail_after(100):
        async with secured.connect("learner") as learner, bare_client(secured, user, TRUST) as attacker:
            for number in range(MOST):
                await attacker.client.subscribe(f"{attacker.inbox}.{number}")
            await attacker.settle()
            assert not attacker.client.is_closed
            await attacker.client.subscribe(f"{attacker.inbox}.more")
            await until_cut(attacker)
            assert await scan(learner, SUBJECTS.log)
        async with secured.connect("admin") as again:
            assert await scan(again, SUBJECTS.log)


@pytest.mark.parametrize("user", sorted(server_config.SMALL_SENDERS))
async def test_who_only_asks_sends_no_large_message(secured: SecuredServer, user: str) -> None:
    """Nor a consumer with filters without end, for which the server would answer nobody else meanwhile."""
    filters = [f"fb.{TRUST}.task.default.{'x' * 40}{number}" for number in range(10_000)]
    creation = {"stream_name": LOG, "config": {"filter_subjects": filters, "ack_policy": "none", "mem_storage": True}}
    with anyio.fail_after(100):
        async with secured.connect("learner") as learner:
            for content in (bytes(server_config.SMALL_PAYLOAD + 1), json.dumps(creation).encode()):
                async with bare_client(secured, user, TRUST) as attacker:
                    attacker.client._max_payload = 1 << 20  # what another client would not look at
                    await attacker.send(f"fbapi.CONSUMER.CREATE.{LOG}.own", content, reply=f"{attacker.inbox}.x")
                    await until_cut(attacker)
            await learner.publish(SUBJECTS.task("default", f"large-{user}"), bytes((1 << 20) - 4096))
        async with bare_client(secured, user, TRUST) as honest:
            assert await honest.ask(f"fbapi.STREAM.INFO.{LOG}") is not None


async def until_cut(attacker: BareClient) -> None:
    while not attacker.client.is_closed:  # noqa: ASYNC110  # nats-py tells nobody
        await anyio.sleep(0.02)


async def test_an_environment_workers_key_removes_no_image_and_reaches_no_weights(secured: SecuredServer) -> None:
    pictures, weights = images_bucket(TRUST), weights_bucket(TRUST)
    async with secured.connect("environment") as honest, secured.connect("learner") as learner:
        name = await put_content(honest.objects(pictures), PICTURE)  # type: ignore[arg-type]
        await learner.objects(weights).put_bytes("v1", b"weights")  # type: ignore[union-attr]
        async with bare_client(secured, "admin", TRUST) as admin, bare_client(secured, "environment", TRUST) as attacker:
            before = await describe_state(admin, TRUST)
            chunks = [each for each in before[f"OBJ_{pictures}"]["subjects"] if each.startswith(f"$O.{pictures}.C.")]
            for rollup in ("all", "sub"):
                for subject in (*chunks, f"$O.{pictures}.M.x", f"$O.{weights}.M.djE=", f"$O.{weights}.C.x"):
                    await attacker.ask(subject, b"gone", headers={"Nats-Rollup": rollup})
            for bucket in (pictures, weights):
                for question in (
                    f"STREAM.PURGE.OBJ_{bucket}",
                    f"STREAM.MSG.DELETE.OBJ_{bucket}",
                    f"STREAM.DELETE.OBJ_{bucket}",
                ):
                    assert await attacker.ask(f"fbapi.{question}", b"") is None
            after = await describe_state(admin, TRUST)
            assert after[f"OBJ_{weights}"] == before[f"OBJ_{weights}"]
            assert removed(before[f"OBJ_{pictures}"], after[f"OBJ_{pictures}"]) == []
        assert await get_content(learner.objects(pictures), name) == PICTURE  # type: ignore[arg-type]
        assert await learner.objects(weights).get_bytes("v1", max_bytes=100) == b"weights"  # type: ignore[union-attr]


def removed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, count in before["subjects"].items() if after["subjects"].get(name, 0) < count]


@pytest.mark.parametrize("size", [3, 1 << 21], ids=["other", "too large"])
async def test_something_else_of_its_name_among_the_images_hides_no_manifest(secured: SecuredServer, size: int) -> None:
    manifest = b"a manifest" * size
    async with secured.connect("environment") as attacker, secured.connect("learner") as learner:
        name = await put_content(get_object_store(learner, TRUST), manifest[:1000])  # type: ignore[arg-type]
        await get_image_store(attacker, TRUST).put_bytes(name, bytes(size))  # type: ignore[union-attr]
        every = get_every_object(learner, TRUST)
        assert every is not None and await get_content(every, name, max_bytes=1 << 20) == manifest[:1000]
        with pytest.raises(ObjectMissing):
            await get_content(every, "0" * 64)


async def test_an_image_that_could_not_be_stored_whole_fails_alone(secured: SecuredServer) -> None:
    """Its worker may remove nothing: what is there of it stays, and the next try stores it whole."""
    async with secured.connect("environment") as bus, secured.connect("learner") as learner:
        store: Any = bus.objects(images_bucket(TRUST))
        await store._clear_chunks("a", "0123456789abcdef012345")
        name = await put_content(store, PICTURE + b"again")
        assert await get_content(learner.objects(images_bucket(TRUST)), name) == PICTURE + b"again"  # type: ignore[arg-type]


async def test_inboxes_of_a_role_are_its_own(secured: SecuredServer) -> None:
    async with bare_client(secured, "environment", TRUST) as attacker:
        await attacker.client.subscribe(f"{build_inbox_prefix('learner')}.>")
        await attacker.settle()
        assert len(attacker.violations) == 1 and isinstance(attacker, BareClient)
