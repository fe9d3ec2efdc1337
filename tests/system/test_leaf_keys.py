"""Leaf nodes of servers with keys: whose may connect, what they may claim to be, and when they are out."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from signal import SIGHUP

import anyio
import pytest

from fleetbus.auth import server_config
from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.leaf_config import LEAF_PORT
from fleetbus.auth.renewal import renew_certificates
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import plan_run
from fleetbus.errors import UserError
from fleetbus_workers.cli.program import run_program
from tests.support.leaf_client import CUT, leaf_client
from tests.support.leaf_server import leaf_server
from tests.support.ports import free_ports

RUN, OTHER = "sites", "other"
PLANS = [plan_run(run, lanes=2, max_bytes=1 << 28) for run in (RUN, OTHER)]
REFUSED = "'Authorization Violation'"


class Hub:
    """A server that listens for leaf nodes of environment workers' sites on ``port``."""

    def __init__(self, keys: AuthFolder, server: NatsServerProcess, port: int) -> None:
        self.keys = keys
        self.server = server
        self.port = port

    async def reload(self) -> None:
        before = self.server.log_file.read_text().count("Reloaded server configuration")
        os.kill(self.server.pid, SIGHUP)
        while self.server.log_file.read_text().count("Reloaded server configuration") == before:  # noqa: ASYNC110  # its process
            await anyio.sleep(0.01)


@asynccontextmanager
async def hub(folder: Path) -> AsyncIterator[Hub]:
    keys, (port,) = AuthFolder(folder / "keys"), free_ports(1)
    write_folder(keys, PLANS, hosts=["127.0.0.1"], days=1, leaf_roles=["environment"])
    text = keys.server_config.read_text().replace(f"0.0.0.0:{LEAF_PORT}", f"127.0.0.1:{port}")
    keys.server_config.write_text(text)
    with anyio.fail_after(50):
        async with run_server(folder / "nats", config=keys.server_config) as server:
            for plan in PLANS:
                access = build_access("init", str(keys.path), plan.run)
                async with connect(server.url, run=plan.run, role="init", **access) as bus:
                    await bus.declare(plan)
            yield Hub(keys, server, port)


async def test_a_leaf_node_needs_a_key_and_one_of_a_role_that_sites_may_have(tmp_path: Path) -> None:
    async with hub(tmp_path) as made:
        folder, port = made.keys.path, made.port
        async with leaf_client(folder, port, "environment", RUN, has_key=False) as nobody:
            assert nobody.violations == [REFUSED, CUT]
        for user in ("admin", "learner", "recorder", "monitor"):
            async with leaf_client(folder, port, user, RUN) as other:
                assert other.violations == [REFUSED, CUT], user
        async with connect(made.server.url, run=RUN, role="learner", **build_access("learner", str(folder), RUN)) as bus:
            assert (await bus.log_state()).last_sequence == 0, "as a client it is let in"
        async with leaf_client(folder, port, "environment", RUN) as own:
            assert own.violations == []


async def test_one_key_connects_so_many_leaf_nodes_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_config, "SITES", 2)
    async with hub(tmp_path) as made, AsyncExitStack() as stack:
        leaves = [await stack.enter_async_context(leaf_client(made.keys.path, made.port, "environment", RUN)) for _ in range(3)]
        assert [CUT in each.violations for each in leaves] == [False, False, True]


@pytest.mark.parametrize("is_hub", [False, True])
async def test_a_leaf_node_does_not_become_another_account_by_saying_so(tmp_path: Path, *, is_hub: bool) -> None:
    """The server tells JetStream who asks in a header, which a leaf node may send itself."""
    async with hub(tmp_path) as made:
        for claim in ({"acc": f"fb_{OTHER}"}, {"acc": f"fb_{OTHER}", "svc": f"fb_{OTHER}"}):
            for subject in (f"$JS.API.STREAM.INFO.fb_{OTHER}", f"fbapi.STREAM.INFO.fb_{OTHER}", "$SYS.REQ.SERVER.PING"):
                async with leaf_client(made.keys.path, made.port, "environment", RUN, hub=is_hub) as leaf:
                    leaf.headers = f"NATS/1.0\r\nNats-Request-Info: {json.dumps(claim)}\r\n\r\n".encode()
                    assert await leaf.ask(subject) is None
            async with leaf_client(made.keys.path, made.port, "environment", RUN, hub=is_hub) as leaf:
                leaf.headers = f"NATS/1.0\r\nNats-Request-Info: {json.dumps(claim)}\r\n\r\n".encode()
                answer = await leaf.ask(f"fbapi.STREAM.INFO.fb_{RUN}")
                assert answer is not None and json.loads(answer.data)["config"]["name"] == f"fb_{RUN}"


@pytest.mark.integration
async def test_a_leaf_node_of_a_withdrawn_key_is_out_once_the_server_was_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reload does not end it (nats-server 2.15), which is why `auth revoke` asks for a restart and why keys of other roles
    connect none."""
    question = f"fbapi.STREAM.INFO.fb_{RUN}"
    async with hub(tmp_path) as made:
        kept = AuthFolder(tmp_path / "stolen")
        kept.path.mkdir()
        for file in (made.keys.authority, made.keys.key(RUN, "environment")):
            (kept.path / file.name).write_bytes(file.read_bytes())
        async with leaf_client(kept.path, made.port, "environment", RUN) as stolen:
            assert run_program(["auth", "revoke", str(made.keys.path), "environment", "--run", RUN]) == 0
            said = capsys.readouterr().out
            assert "start each again" in said and "fleetbus auth site" in said
            await made.reload()
            async with leaf_client(kept.path, made.port, "environment", RUN) as later:
                assert later.violations == [REFUSED, CUT], "no other one comes in"
            assert await stolen.ask(question) is not None, "a reload ends it by now: withdraw what docs and output say"
            await made.server.stop()
            await made.server.restart()
            assert await stolen.ask(question) is None and CUT in stolen.violations
        async with leaf_client(kept.path, made.port, "environment", RUN) as again:
            assert again.violations == [REFUSED, CUT]
    assert run_program(["auth", "rotate", str(made.keys.path), "learner", "--run", RUN]) == 0
    assert "start each again" not in capsys.readouterr().out


async def test_a_worker_that_starts_while_its_site_has_no_link_is_told_of_the_link(tmp_path: Path) -> None:
    keys, (nowhere,) = AuthFolder(tmp_path / "keys"), free_ports(1)
    write_folder(keys, PLANS, hosts=["127.0.0.1"], days=1, leaf_roles=["environment"])
    with anyio.fail_after(50):
        async with leaf_server(keys, PLANS[0], "environment", tmp_path / "site", nowhere, until="Server is ready") as url:
            access = build_access("environment", str(tmp_path / "site"), RUN)
            with pytest.raises(UserError, match="a site's server may have lost its link to the run's"):
                async with connect(url, run=RUN, role="environment", **access):
                    pass


@pytest.mark.integration
async def test_a_site_whose_link_stays_away_logs_one_line_a_minute_of_it(tmp_path: Path) -> None:
    async with hub(tmp_path) as made:
        async with leaf_server(made.keys, PLANS[0], "environment", tmp_path / "site", made.port):
            await made.server.kill()
            await anyio.sleep(5)
        assert (tmp_path / "site" / "server.log").read_text().count("Error trying to connect") <= 1


async def test_leaf_nodes_are_shown_a_renewed_certificate_after_the_reload(tmp_path: Path) -> None:
    async with hub(tmp_path) as made:
        for _ in range(2):
            renew_certificates(made.keys, days=2)
        await made.reload()
        shown = await anyio.to_thread.run_sync(fetch_certificate, made)
        assert shown.strip() == made.keys.server_certificate.read_text().strip()


def fetch_certificate(made: Hub) -> str:
    return ssl.get_server_certificate(("127.0.0.1", made.port), timeout=10)


def test_keys_that_are_not_for_sites_do_not_get_into_a_sites_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, site = str(tmp_path / "keys"), str(tmp_path / "site")
    assert run_program(["auth", "init", keys]) == 0
    command = ["auth", "site", keys, site, "--hub", "localhost"]
    assert run_program(command) == 2
    assert "listens for no sites" in capsys.readouterr().err
    assert run_program(["auth", "init", keys, "--leaf", "localhost"]) == 0
    assert run_program([*command, "--role", "inference"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "lets sites be environment and not inference: write it with `fleetbus auth init --leaf HOST --leaf-role inference`"
    )
    assert not Path(site).exists()
    assert run_program(command) == 0
    assert sorted(file.name for file in Path(site).iterdir() if not file.name.startswith(".")) == [
        "ca.pem", "default.environment.nk", "hub-ca.pem", "nats-server.conf", "server-key.pem", "server.pem",
    ]  # fmt: skip
