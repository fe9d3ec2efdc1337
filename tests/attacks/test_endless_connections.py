"""One key opens connections without end: from some number on the server refuses it, and everybody else still gets in."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack

import anyio
import pytest

from fleetbus.auth import server_config
from tests.support.backends import asyncio_alone
from tests.support.bare_client import bare_client
from tests.support.secured_server import SUBJECTS, TRUST, SecuredServer, scan, secured_server
from tests.support.small_deployment import LANES

pytestmark = pytest.mark.timeout(120)

anyio_backend = asyncio_alone

SPARE = 8
MOST = server_config.CONNECTIONS_PER_LANE * LANES + SPARE


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[SecuredServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_config, "SPARE_CONNECTIONS", SPARE)
        with secured_server(tmp_path_factory) as server:
            yield server


@pytest.mark.parametrize("user", ["monitor", "gateway"])
async def test_a_key_has_so_many_connections_and_takes_none_of_others(secured: SecuredServer, user: str) -> None:
    opened = 0
    with anyio.fail_after(100):
        async with AsyncExitStack() as stack:
            with pytest.raises(Exception, match="maximum account active connections"):
                for _ in range(2 * MOST):
                    await stack.enter_async_context(bare_client(secured, user, TRUST))
                    opened += 1
            assert opened == MOST
            async with secured.connect("learner") as learner:
                assert await scan(learner, SUBJECTS.log)
