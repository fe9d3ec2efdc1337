"""Random (subject, reply) pairs with each role's key: nothing changes that the role's table does not let it change."""

from __future__ import annotations

import json
import random
from collections.abc import Generator

import anyio
import pytest

from fleetbus.auth.permissions import build_rights
from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import API, IMPORTED_API, plan_run
from fleetbus_schemas import Subjects
from fleetbus_schemas.channels import ROLES
from tests.support.auth_operations import covers
from tests.support.bare_client import BareClient, bare_client, describe_state
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES, RUN

LIMITED = [user for user in ROLES if user != "admin"]
PLAN = plan_run(TRUST, lanes=LANES)
BUCKET = f"OBJ_{weights_bucket(TRUST)}"
STREAMS = (LOG, PLAN.lanes.name, BUCKET, f"OBJ_{images_bucket(TRUST)}", f"fb_{RUN}", f"OBJ_{weights_bucket(RUN)}")
STREAM_VERBS = ("CREATE", "UPDATE", "DELETE", "PURGE", "INFO", "MSG.DELETE", "MSG.GET", "SNAPSHOT", "RESTORE")
CONSUMER_VERBS = ("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT", "PAUSE", "RESET", "UNPIN", "LEADER.STEPDOWN")
SETTLE_SECONDS = 0.5


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    """A server for each role: a pull request that one of them leaves behind may go on to deliver to it."""
    with secured_server(tmp_path_factory) as server:
        yield server


class Pairs:
    """Subjects, replies, payloads and headers by chance: of the role's own kind, of others', of the server's API."""

    def __init__(self, user: str, seed: str) -> None:
        self.random = random.Random(f"{user} {seed}")
        self.own = build_rights(user, PLAN).publish
        self.others = tuple({subject for other in LIMITED for subject in build_rights(other, PLAN).publish})
        self.names = [consumer.name for consumer in PLAN.consumers]

    def subject(self) -> str:
        kind = self.random.randrange(6)
        if kind < 2:
            subject = self._filled(self.random.choice(self.own))
            elsewhere = subject.replace(f"{IMPORTED_API}.", f"{API}.").replace("fbwork_", "fb_")
            return self.random.choice((subject, elsewhere))
        if kind == 2:
            return self._filled(self.random.choice(self.others))
        if kind == 3:
            return self._filled(self.random.choice(self.others)).replace(f".{TRUST}.", f".{RUN}.")
        if kind == 4:
            return self._api()
        ack = f"$JS.ACK.{LOG}.{self.random.choice(self.names)}.1.{self.random.randrange(1, 9)}.1.1.0"
        return self.random.choice(
            (ack, f"$JS.FC.{LOG}.x.y", "$SYS.REQ.SERVER.PING", "_R_.x.y", "$KV.x.y", "$JS.EVENT.ADVISORY.x")
        )

    def payload(self) -> bytes:
        name = self.random.choice(self.names)
        target = self._filled(self._api())
        consumer = {"name": name, "durable_name": name, "ack_policy": "explicit", "deliver_subject": target}
        options: tuple[object, ...] = (
            {},
            {"batch": 5, "no_wait": True},
            {"seq": 9},
            {"last_by_subj": f"{SUBJECTS.log[:-1]}none"},
            {"stream_name": LOG, "config": {key: value for key, value in consumer.items() if self.random.random() < 0.7}},
            {"name": LOG, "subjects": ["x"], "mirror": {"name": LOG}},
            {"filter": ">"},
        )
        chosen = self.random.randrange(len(options) + 3)
        if chosen >= len(options):
            return (b"", b"+ACK", b"+TERM")[chosen - len(options)]
        return json.dumps(options[chosen]).encode()

    def headers(self) -> dict[str, str] | None:
        name = self.random.choice(("", "", "", "Nats-Rollup", "Nats-Trace-Dest", "Nats-Request-Info", "Nats-TTL"))
        if not name:
            return None
        info = json.dumps({"acc": f"fb_{TRUST}", "svc": f"fb_{TRUST}"})
        return {name: {"Nats-Rollup": "all", "Nats-Trace-Dest": self._api(), "Nats-Request-Info": info}.get(name, "1")}

    def _api(self) -> str:
        prefix, stream = self.random.choice(("$JS.API", "fbapi")), self.random.choice(STREAMS)
        if self.random.randrange(2):
            return f"{prefix}.STREAM.{self.random.choice(STREAM_VERBS)}.{stream}"
        verb, name = self.random.choice(CONSUMER_VERBS), self.random.choice(self.names)
        return f"{prefix}.CONSUMER.{verb}.{self.random.choice((stream, f'fbwork_{TRUST}'))}.{name}"

    def _filled(self, pattern: str) -> str:
        tokens = [f"z{self.random.randrange(4)}" if token in "*>" else token for token in pattern.split(".")]
        return ".".join(tokens)


def harm(user: str, before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> list[str]:
    """What changed that the role has no right to change."""
    own, found = build_rights(user, PLAN).publish, []
    purges = {LOG: user == "recorder", BUCKET: user == "learner"}
    trimmed = before[LOG]["first"] != after.get(LOG, {}).get("first")  # by the recorder: consumers go on behind what is gone
    works = {"environment": ("task_", "act_"), "inference": ("obs_",)}.get(user, ("\0",))
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or before[name]["config"] != after[name]["config"]:
            found.append(f"{name} was made, deleted or changed")
        elif "subjects" in before[name]:
            was, now = before[name]["subjects"], after[name]["subjects"]
            assert isinstance(was, dict) and isinstance(now, dict)
            for subject in sorted(was.keys() | now.keys()):
                count, later = was.get(subject, 0), now.get(subject, 0)
                if later > count and not any(covers(pattern, subject) for pattern in own):
                    found.append(f"{later - count} entries were written on {subject}")
                kept_once = name == PLAN.lanes.name and any(covers(pattern, subject) for pattern in own)
                if later < count and not purges.get(name) and not kept_once:
                    found.append(f"{count - later} entries were removed from {subject}")
        elif before[name] != after[name] and not name.startswith(works) and not (purges[LOG] and trimmed):
            found.append(f"{name} was pulled from or acked: {before[name]} became {after[name]}")
    return found


async def states(admins: tuple[BareClient, BareClient]) -> dict[str, dict[str, object]]:
    """Of both runs."""
    return {
        **await describe_state(admins[0], TRUST),
        **{f"{RUN} {k}": v for k, v in (await describe_state(admins[1], RUN)).items()},
    }


async def fuzz(secured: SecuredServer, user: str, pairs: int) -> list[str]:
    async with secured.connect("init", run=RUN) as bus:
        await bus.declare(plan_run(RUN, lanes=LANES, max_bytes=1 << 28))
        await bus.publish(Subjects(RUN).episode("e0"), b"an entry")
    async with (
        bare_client(secured, "admin", TRUST) as admin,
        bare_client(secured, "admin", RUN) as other_admin,
        bare_client(secured, user, TRUST) as attacker,
    ):
        chance = Pairs(user, "1")
        before = await states((admin, other_admin))
        for count in range(pairs):
            reply = chance.random.choice((chance.subject, chance._api))()
            await attacker.send(chance.subject(), chance.payload(), reply=reply, headers=chance.headers())
            if count % 50 == 0:
                await attacker.settle()
        await attacker.settle()
        await anyio.sleep(SETTLE_SECONDS)  # what an answer sets off is not answered to anybody
        assert attacker.client.is_connected
        return harm(user, before, await states((admin, other_admin)))


@pytest.mark.integration
@pytest.mark.parametrize("user", LIMITED)
async def test_a_hundred_random_pairs_change_nothing_that_the_role_may_not_change(secured: SecuredServer, user: str) -> None:
    with anyio.fail_after(55):
        assert await fuzz(secured, user, 100) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("user", LIMITED)
async def test_two_thousand_random_pairs_change_nothing_that_the_role_may_not_change(secured: SecuredServer, user: str) -> None:
    with anyio.fail_after(280):
        assert await fuzz(secured, user, 2000) == []
