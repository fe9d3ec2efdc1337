"""Attacks by what the server does not check: the reply subject, and what a question's payload names. With each role's key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import nats
import pytest

from fleetbus.auth.consumer_names import COUNTED
from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.keys import public_key
from fleetbus.auth.permissions import build_rights
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import API, IMPORTED_API, plan_run
from fleetbus.errors import BusError
from fleetbus_schemas import EpisodeRequested, OperationRecorded, PolicyPublished, Task, encode
from fleetbus_schemas.channels import ROLES
from tests.support.bare_client import BareClient, bare_client, describe_state
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES, RUN

LIMITED = [user for user in ROLES if user != "admin"]
DURABLE = "task_default"
MISSING = json.dumps({"last_by_subj": "fb.trust.task.default.none"}).encode()
"""A direct get whose answer is an empty message: what requests to delete have to be."""

PLAN = plan_run(TRUST, lanes=LANES)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


@asynccontextmanager
async def attacking(secured: SecuredServer, user: str) -> AsyncIterator[tuple[BareClient, BareClient]]:
    """The attacker and, to look at what became of it, the admin."""
    with anyio.fail_after(55):
        async with AsyncExitStack() as stack:
            attacker = await stack.enter_async_context(bare_client(secured, user, TRUST))
            yield attacker, await stack.enter_async_context(bare_client(secured, "admin", TRUST))


def questions(attacker: str) -> list[tuple[str, bytes]]:
    """What the role may ask, or might once have been allowed to, and somebody answers."""
    policy = PolicyPublished(policy="default", version=9, lineage="x", step=9, uri="file:///x", manifest=(), size_bytes=1)
    asked: list[tuple[str, bytes]] = []
    for api in ("fbapi", "$JS.API"):
        asked += [
            (f"{api}.STREAM.INFO.{LOG}", b""),
            (f"{api}.DIRECT.GET.{LOG}", MISSING),
            (f"{api}.DIRECT.GET.{LOG}.{SUBJECTS.action('e0', 'none')}", b""),
            (f"{api}.DIRECT.GET.{LOG}.{SUBJECTS.session('none')}", b""),
            (f"{api}.DIRECT.GET.{LOG}.{SUBJECTS.life(attacker, 'empty')}", b""),
            (f"{api}.DIRECT.GET.OBJ_fbweights_{TRUST}", MISSING),
            (f"{api}.CONSUMER.MSG.NEXT.{LOG}.own", b'{"batch":1,"no_wait":true}'),
        ]
    said = (SUBJECTS.life(attacker, "w"), SUBJECTS.episode("forged"), SUBJECTS.action("e0", "forged"))
    return [*asked, *((subject, encode(policy)) for subject in said), ("$SRV.PING", b"")]


def targets() -> list[str]:
    """Where the answer would do harm."""
    found = []
    for api in ("$JS.API", "fbapi"):
        for stream in (LOG, f"fblane_{TRUST}", f"OBJ_fbweights_{TRUST}", f"OBJ_fbimages_{TRUST}", f"fb_{RUN}"):
            found += [f"{api}.STREAM.{verb}.{stream}" for verb in ("DELETE", "PURGE", "UPDATE")]
        found += [f"{api}.CONSUMER.DELETE.{LOG}.{DURABLE}", f"{api}.CONSUMER.MSG.NEXT.{LOG}.{DURABLE}"]
        found += [f"{api}.CONSUMER.CREATE.{LOG}.{DURABLE}"]
    found += [SUBJECTS.policy("default"), SUBJECTS.train("default"), "fb.small.episode.e1"]
    return [
        *found,
        f"$JS.ACK.{LOG}.{DURABLE}.1.1.1.1.0",
        "fblane.trust.x.l0",
        f"$O.fbweights_{TRUST}.M.eA==",
        f"$O.fbimages_{TRUST}.M.eA==",
    ]


def without_own(state: dict[str, object], user: str) -> dict[str, object]:
    """What a role writes under its own name, on subjects of its own, is no harm; the recorder may trim, whatever that is."""
    log = state[LOG]
    assert isinstance(log, dict)
    own = (SUBJECTS.life(user, ""), SUBJECTS.episode("forged"), SUBJECTS.action("e0", "forged"))
    kept = {name: count for name, count in log["subjects"].items() if not name.startswith(own)}
    moved = ("last", "first") if user == "recorder" else ("last",)
    return state | {LOG: {name: value for name, value in log.items() if name not in moved} | {"subjects": kept}}


@pytest.mark.parametrize("user", LIMITED)
async def test_no_answer_can_be_sent_where_it_does_harm(secured: SecuredServer, user: str) -> None:
    """Each question that a role may ask, answered to each subject that changes something."""
    async with attacking(secured, user) as (attacker, admin):
        await attacker.send(SUBJECTS.life(user, "empty"), b"")
        creation = {"stream_name": LOG, "config": {"name": "own", "ack_policy": "none", "headers_only": True}}
        await attacker.send(f"fbapi.CONSUMER.CREATE.{LOG}.own", json.dumps(creation).encode())
        await attacker.settle()
        before = await describe_state(admin, TRUST)
        for question, payload in questions(user):
            for target in targets():
                if not (user == "recorder" and target == f"fbapi.STREAM.PURGE.{LOG}"):
                    await attacker.send(question, payload, reply=target)
        await attacker.settle()
        await anyio.sleep(0.3)  # what an answer sets off is not answered to anybody
        after = await describe_state(admin, TRUST)
    changed = without_own(after, user), without_own(before, user)
    own_bucket = {"environment": f"OBJ_fbimages_{TRUST}", "learner": f"OBJ_fbweights_{TRUST}"}.get(user, "")
    if own_bucket:  # they may store objects
        changed[0].pop(own_bucket), changed[1].pop(own_bucket)
    if user in ("learner", "environment", "inference", "operator"):
        drop_written_by(user, *changed)
    assert changed[0] == changed[1]


def drop_written_by(user: str, *states: dict[str, object]) -> None:
    """Subjects that the role may write by its table; an answer that lands there is one more entry of its own."""
    own = {"learner": ("policy.", "train."), "environment": (), "inference": (), "operator": ()}[user]
    for state in states:
        log = state[LOG]
        assert isinstance(log, dict)
        log["subjects"] = {
            name: count
            for name, count in log["subjects"].items()
            if not name.startswith(tuple(f"fb.{TRUST}.{each}" for each in own))
        }


@pytest.mark.parametrize("user", LIMITED)
async def test_a_stored_message_cannot_be_sent_on_as_another_ones(secured: SecuredServer, user: str) -> None:
    """A direct get of an entry of one's own, answered to a subject of the log, used to store a forged policy."""
    policy = PolicyPublished(policy="forged", version=9, lineage="x", step=9, uri="file:///x", manifest=(), size_bytes=1)
    task = EpisodeRequested(
        episode_id="forged", group_id="g", sample_index=0, split="train", task=Task(key="t"), policy="default", deadline_ns=1
    )
    operation = OperationRecorded(operation="purge", targets=("everything",), count=1)
    in_its_name = SUBJECTS.operation("operator", public_key(AuthFolder(secured.folder).key(TRUST, "operator")))
    own = SUBJECTS.life(user, "forger")
    forged = (SUBJECTS.policy("forged"), SUBJECTS.task("forged", "forged"), in_its_name)
    async with attacking(secured, user) as (attacker, admin):
        before = (await describe_state(admin, TRUST))[LOG]["subjects"]
        for payload, target in zip((encode(policy), encode(task), encode(operation)), forged, strict=True):
            await attacker.send(own, payload)
            for api in ("fbapi", "$JS.API"):
                await attacker.send(f"{api}.DIRECT.GET.{LOG}.{own}", b"", reply=target)
                await attacker.send(f"{api}.DIRECT.GET.{LOG}", json.dumps({"last_by_subj": own}).encode(), reply=target)
        await attacker.settle()
        await anyio.sleep(0.2)
        written = (await describe_state(admin, TRUST))[LOG]["subjects"]
    allowed = {"learner": set(forged[:2]), "operator": {*forged[1:]}}.get(user, set())
    assert {target for target in forged if written.get(target, 0) > before.get(target, 0)} <= allowed


@pytest.mark.parametrize("user", ["inference", "learner", "operator", "recorder", "gateway", "monitor"])
async def test_a_consumer_of_ones_own_can_neither_drain_nor_change_those_that_work_is_taken_from(
    secured: SecuredServer, user: str
) -> None:
    """Who may make a consumer may have it deliver to any subject of the streams' account, the pull subject of another included,
    and may give it any name (monitor and recorder: those of their own). Neither meets a durable consumer: nobody can guess
    those names."""
    drain, taken, *_ = AuthFolder(secured.folder).access(PLAN).readers.get(user, ("drain", DURABLE))
    followed = SUBJECTS.session("*") if user == "gateway" else SUBJECTS.episode("*")
    async with attacking(secured, user) as (attacker, admin):
        for _ in range(3):
            await admin.send(followed.replace("*", "bait"), b"")
        before = await describe_state(admin, TRUST)
        names = [name for name in before if name.startswith(DURABLE)]
        assert names and names != [DURABLE]
        delivered = {"deliver_subject": f"$JS.API.CONSUMER.MSG.NEXT.{LOG}.{DURABLE}", "ack_policy": "explicit"}
        for config in (delivered | {"name": drain}, {"name": taken, "ack_policy": "none"}):
            question = {"stream_name": LOG, "config": config | {"filter_subject": followed, "headers_only": True}}
            payload = json.dumps(question).encode()
            ending = "" if user in COUNTED else f".{followed}"  # its rights are names, whatever it filters by
            answer = await attacker.ask(f"fbapi.CONSUMER.CREATE.{LOG}.{config['name']}{ending}", payload)
            assert answer is not None and b'"error"' not in answer.data
        await anyio.sleep(0.3)
        assert await describe_state(admin, TRUST) == before
        for name in (drain, taken):
            await attacker.ask(f"fbapi.CONSUMER.DELETE.{LOG}.{name}")


@pytest.mark.parametrize("user", [user for user in LIMITED if user != "environment"])
async def test_an_answer_does_not_ack_what_another_worker_was_given(secured: SecuredServer, user: str) -> None:
    """The server hands a reply below ``$JS.ACK.`` on into the streams' account, whoever names it."""
    asked = {
        "inference": (f"DIRECT.GET.{LOG}.{SUBJECTS.action('e0', 'none')}", b""),
        "gateway": (f"DIRECT.GET.{LOG}.{SUBJECTS.session('none')}", b""),
    }
    question, payload = asked.get(user, (f"DIRECT.GET.{LOG}", MISSING))
    async with attacking(secured, user) as (attacker, admin):
        async with secured.connect("environment") as bus, bus.pull(DURABLE, credits=1) as tasks:
            given = await tasks.receive()
            for cycle in range(1, 60):
                ack = f"$JS.ACK.{LOG}.{DURABLE}.{given.delivered}.{given.message.sequence}.{cycle}.{given.message.time_ns}.0"
                await attacker.send(f"fbapi.{question}", payload, reply=ack)
            await attacker.settle()
            await anyio.sleep(0.2)
            held = {name: each for name, each in (await describe_state(admin, TRUST)).items() if name.startswith(DURABLE)}
            assert [each["num_ack_pending"] for each in held.values()] == [1]
            await given.nak()


async def test_in_one_account_the_same_permissions_do_not_hold(secured: SecuredServer, tmp_path: Path) -> None:
    """What the accounts are for: the monitor's rights as permissions of one account, and one question deletes the log."""
    rights = build_rights("monitor", PLAN)
    allowed = [(need.target or need.subject).replace(f"{IMPORTED_API}.", f"{API}.", 1) for need in rights.asks]
    config = tmp_path / "one-account.conf"
    monitor = {"user": "monitor", "password": "m", "permissions": {"publish": {"allow": allowed}, "subscribe": ["_INBOX.>"]}}
    users = [{"user": "admin", "password": "a"}, monitor]
    config.write_text(f"authorization: {json.dumps({'users': users})}")
    async with run_server(tmp_path / "store", config=config) as server, AsyncExitStack() as stack:
        host = server.url.removeprefix("nats://")
        async with connect(f"nats://admin:a@{host}", run=TRUST) as bus:
            await bus.declare(plan_run(TRUST, lanes=LANES))
            assert (await bus.log_state()).last_sequence == 0
            attacker = await nats.connect(f"nats://monitor:m@{host}")
            stack.push_async_callback(attacker.close)
            await attacker.publish(f"$JS.API.DIRECT.GET.{LOG}", MISSING, reply=f"$JS.API.STREAM.DELETE.{LOG}")
            with pytest.raises(BusError, match="stream not found"), anyio.fail_after(10):
                while True:
                    await bus.log_state()


def test_names_of_consumers_stand_in_no_file_that_others_may_read(secured: SecuredServer) -> None:
    """They are what keeps them safe."""
    folder = AuthFolder(secured.folder)
    config = folder.server_config
    assert config.stat().st_mode & 0o077 == 0
    assert f"{LOG}.obs_default_any-" in config.read_text() and DURABLE not in config.read_text()
    readable = [file for file in secured.folder.iterdir() if file.stat().st_mode & 0o077]
    assert sorted(file.name for file in readable) == ["ca.pem", "server.pem"]
