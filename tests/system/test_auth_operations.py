"""The same 58 operations with each user's key on a real server, directly, through a leaf node of `fleetbus auth site`,
and in the protocol of leaf nodes: exactly those go through that the table in docs allows.

That the table is the one of the docs is `tests/unit/test_rights_table.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from nats.aio.msg import Msg

from fleetbus.auth.consumer_names import COUNTED
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.permissions import build_rights
from fleetbus.bus.nats.server import NatsServerProcess
from fleetbus.bus.streams import plan_run
from fleetbus_schemas.channels import ROLES, WORKERS
from tests.support.auth_operations import ASK, CALL, LISTEN, PUBLISH, READER, TELL, Operation, is_allowed, operations
from tests.support.bare_client import BareClient, bare_client
from tests.support.leaf_client import leaf_client
from tests.support.leaf_server import leaf_server
from tests.support.secured_server import TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]

HEARD_SECONDS = 2.0
TRIES = 4
READERS = tuple(f"{READER}-{name}" for name in ("tasks", "episodes", "all", "policies"))
OPERATIONS = operations(TRUST)
PLAN = plan_run(TRUST, lanes=LANES)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


@asynccontextmanager
async def answering(secured: SecuredServer) -> AsyncIterator[dict[str, BareClient]]:
    """A worker of each role that answers whatever it is asked, and others to speak and to listen."""
    async with AsyncExitStack() as stack:
        clients = {user: await stack.enter_async_context(bare_client(secured, user, TRUST)) for user in ROLES}
        for role in WORKERS:
            for subject in build_rights(role, PLAN).serves:

                async def answer(message: Msg, worker: BareClient = clients[role]) -> None:
                    await worker.send(message.reply, b"answer")

                await clients[role].client.subscribe(subject, cb=answer)
            await clients[role].settle()
        yield clients


def rename(operation: Operation, readers: Mapping[str, str]) -> Operation:
    """A monitor and the recorder read by consumers of certain names alone."""
    tokens = (readers.get(token, token) for token in operation.subject.split("."))
    return Operation(name=operation.name, kind=operation.kind, subject=".".join(tokens))


async def goes_through(operation: Operation, user: Any, workers: dict[str, BareClient], names: Mapping[str, str]) -> bool:
    """True if the operation has its effect: an ack of a stream, an answer of JetStream, one of a worker, something heard."""
    subject = operation.subject
    if user.user == "admin":
        last = operation.on_server.rpartition(".")
        subject = f"{last[0]}.{names.get(last[2], last[2])}"
    if operation.kind == LISTEN:
        role = subject.split(".")[2] if subject.startswith("fbhb.") else "admin"
        told = subject.replace("*", "w") if subject.startswith("fbhb.") else f"{workers[role].inbox}.x"
        return await hears(user, subject, workers[role], told)
    if operation.kind == TELL:
        return await hears(workers["monitor"], subject, user, subject)
    payload = {PUBLISH: b"entry", CALL: b"call", ASK: _question(operation)}[operation.kind]
    if user.user in COUNTED and ".CONSUMER.CREATE." in subject:  # its names are its rights, whatever it filters by
        subject = ".".join(subject.split(".")[:5])
    answer = await user.ask(subject, payload)
    if answer is None:
        return False
    if operation.kind == PUBLISH:
        return b'"stream"' in answer.data
    return operation.kind == ASK or answer.data == b"answer"


def _question(operation: Operation) -> bytes:
    """What is answered, and by a refusal where it would do damage."""
    verb = operation.subject.partition(".")[2]
    if verb.startswith("CONSUMER.MSG.NEXT"):
        return b'{"batch":1,"no_wait":true}'
    if verb.startswith("DIRECT.GET") and len(verb.split(".")) == 3:
        return b'{"seq":1}'
    if verb.startswith("CONSUMER.CREATE"):
        _, _, log, name, *followed = verb.split(".")
        return json.dumps(
            {"stream_name": log, "config": {"name": name, "filter_subject": ".".join(followed), "ack_policy": "none"}}
        ).encode()
    return b"{" if verb.startswith(("STREAM.DELETE", "STREAM.PURGE", "STREAM.UPDATE", "STREAM.CREATE")) else b""


async def hears(listener: Any, pattern: str, speaker: Any, subject: str) -> bool:
    known = len(listener.violations)
    subscription = await listener.client.subscribe(pattern)
    await listener.settle()
    try:
        if len(listener.violations) > known:
            return False
        for _ in range(TRIES):  # a leaf node tells the other side a moment later that somebody listens
            spoken = len(speaker.violations)
            await speaker.send(subject, b"heard")
            await speaker.settle()
            if len(speaker.violations) > spoken:
                break
            with anyio.move_on_after(HEARD_SECONDS / TRIES):
                return (await subscription.next_msg(timeout=None)).data == b"heard"
        return False
    finally:
        await subscription.unsubscribe()


@asynccontextmanager
async def through_leaf(secured: SecuredServer, user: str, folder: Path) -> AsyncIterator[BareClient]:
    """A client of a leaf node that holds its key."""
    async with leaf_server(AuthFolder(secured.folder), PLAN, user, folder, secured.leaf_port) as url:
        port = int(url.rpartition(":")[2])
        server = NatsServerProcess(Path(), folder, "127.0.0.1", port, None, None)
        async with bare_client(SecuredServer(folder, server, secured.portal, 0), user, TRUST) as client:
            yield client


async def find_allowed(
    secured: SecuredServer, name: str, connected: Callable[[], AbstractAsyncContextManager[Any]]
) -> dict[str, bool]:
    """For each operation, if it goes through for a user; ``connected`` has a client of it for one operation."""
    found = {}
    async with answering(secured) as workers:
        access = AuthFolder(secured.folder).access(PLAN)
        readers = dict(zip(READERS, access.readers.get(name, ()), strict=False))
        for operation in OPERATIONS:
            async with connected() as user:
                asked = rename(operation, readers)
                found[operation.name] = await goes_through(asked, user, workers, access.names)
    return found


def allowed(name: str) -> dict[str, bool]:
    """The same by the table."""
    rights = build_rights(name, PLAN)
    return {operation.name: is_allowed(rights, operation) for operation in OPERATIONS}


@pytest.mark.parametrize("name", ROLES)
async def test_exactly_what_the_table_allows_goes_through(secured: SecuredServer, name: str) -> None:
    with anyio.fail_after(140):
        async with bare_client(secured, name, TRUST) as user:
            assert await find_allowed(secured, name, lambda: nullcontext(user)) == allowed(name)


@pytest.mark.parametrize("name", [role for role in ROLES if role != "admin"])
async def test_it_is_the_same_through_a_leaf_node(secured: SecuredServer, name: str, tmp_path: Path) -> None:
    with anyio.fail_after(140):
        async with through_leaf(secured, name, tmp_path / "site") as user:
            assert await find_allowed(secured, name, lambda: nullcontext(user)) == allowed(name)


@pytest.mark.parametrize("is_hub", [False, True])
@pytest.mark.parametrize("name", [role for role in ROLES if role != "admin"])
async def test_who_speaks_as_a_leaf_node_may_do_no_more(secured: SecuredServer, name: str, *, is_hub: bool) -> None:
    """As the site's server would, if somebody else's program stood in its place; it may claim to be the other side's hub."""

    def speak() -> AbstractAsyncContextManager[Any]:
        return leaf_client(secured.folder, secured.leaf_port, name, TRUST, hub=is_hub)

    with anyio.fail_after(140):
        found = await find_allowed(secured, name, speak)
    assert found == allowed(name)
