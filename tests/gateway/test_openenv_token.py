"""An OpenEnv gateway with a token: whoever knows a session's name alone gets nowhere."""

from __future__ import annotations

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from fleetbus_workers.cli.program import run_program
from tests.support.openenv_gateway import gateway


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "s3cret", "Bearer é"])
async def test_without_the_token_nothing_is_to_be_had(authorization: str) -> None:
    headers = [(b"Authorization", authorization.encode())] if authorization else []
    async with gateway(token="s3cret") as here, httpx.AsyncClient(base_url=here.url, headers=headers) as client:
        for path in ("/reset", "/sessions/known/step", "/mcp", "/sessions/known/reset"):
            refused = await client.post(path, json={})
            assert (refused.status_code, refused.json()) == (401, {"detail": "unauthorized"})
        for path in ("/state", "/sessions/known/state", "/metadata"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/health")).status_code == 200
        with pytest.raises(InvalidStatus) as caught:
            async with connect(f"{here.url.replace('http', 'ws', 1)}/sessions/known/ws"):
                pass
        assert caught.value.response.status_code == 403
        assert here.world.opened == 0


async def test_with_the_token_everything_works() -> None:
    headers = {"Authorization": "Bearer s3cret"}
    async with gateway(token="s3cret") as here, httpx.AsyncClient(base_url=here.url, headers=headers) as client:
        assert (await client.post("/sessions/named/reset", json={"seed": 1})).status_code == 200
        socket = connect(f"{here.url.replace('http', 'ws', 1)}/sessions/named/ws", additional_headers=headers)
        async with socket as connection:
            await connection.send('{"type": "step", "data": {"text": "x"}}')
            assert '"x"' in str(await connection.recv())


def test_a_host_that_is_open_to_others_asks_for_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)
    assert run_program(["gateway", "openenv", "--host", "0.0.0.0"]) == 2
    assert "set OPENENV_TOKEN" in capsys.readouterr().err
