"""A key that reads makes a consumer that never acks: what waits for acks of work, trimming, does not wait for it."""

from __future__ import annotations

import json
from collections.abc import Generator

import anyio
import pytest

from fleetbus.auth.folder import AuthFolder
from fleetbus.bus.streams import plan_run, tasks_consumer
from fleetbus_workers.recorder.trim_limit import compute_trim_limit
from tests.support.backends import asyncio_alone
from tests.support.bare_client import bare_client
from tests.support.secured_server import LOG, SUBJECTS, TRUST, SecuredServer, secured_server
from tests.support.small_deployment import LANES

pytestmark = pytest.mark.timeout(60)

anyio_backend = asyncio_alone


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with secured_server(tmp_path_factory) as server:
        yield server


@pytest.mark.parametrize("user", ["monitor", "gateway"])
async def test_a_readers_consumer_that_never_acks_holds_no_trimming(secured: SecuredServer, user: str) -> None:
    mine, *_ = AuthFolder(secured.folder).access(plan_run(TRUST, lanes=LANES)).readers.get(user, (tasks_consumer("mine"),))
    followed = SUBJECTS.log if user == "monitor" else SUBJECTS.session("*")
    config = {"name": mine, "durable_name": mine, "ack_policy": "explicit", "filter_subject": followed}
    with anyio.fail_after(50):
        async with secured.connect("recorder") as recorder, secured.connect("init") as admin:
            await admin.publish(SUBJECTS.session("held"), b"x")
            end = (await recorder.log_state()).last_sequence

            async def limit() -> int:
                return await compute_trim_limit(recorder, limit=end, is_ignorable=lambda subject: ".session." not in subject)

            assert await limit() == end
            async with bare_client(secured, user, TRUST) as attacker:
                asked = json.dumps({"stream_name": LOG, "config": config, "action": "create"}).encode()
                ending = "" if user == "monitor" else f".{followed}"
                answer = await attacker.ask(f"fbapi.CONSUMER.CREATE.{LOG}.{mine}{ending}", asked)
            assert answer is not None and b'"error"' not in answer.data
            assert await limit() == end
