"""Certificates renewed under a deployment that runs: in three steps, none of which refuses somebody who followed them."""

from __future__ import annotations

import os
import signal
import ssl
import time
from pathlib import Path

import anyio
import pytest

from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.renewal import NEXT, RenewalStep, renew_certificates
from fleetbus.bus.nats import connect
from fleetbus.bus.nats.server import run_server
from fleetbus.bus.streams import plan_run
from fleetbus.config.settings import Configuration, NatsSettings
from fleetbus.errors import UserError
from fleetbus_schemas import Subjects
from fleetbus_workers.cli.look.diagnosis import check_certificates
from tests.support.small_deployment import LANES

RUN = "renewed"
PLAN = plan_run(RUN, lanes=LANES, max_bytes=1 << 28)
LIFE = Subjects(RUN).life("learner", "l")


async def test_who_follows_the_steps_is_let_in_at_each_of_them_and_the_old_authority_is_out_at_the_end(tmp_path: Path) -> None:
    keys = AuthFolder(tmp_path / "keys")
    write_folder(keys, [PLAN], hosts=["127.0.0.1", "nats.example"], days=1)
    old = keys.authority.read_bytes()
    with anyio.fail_after(50):
        async with run_server(tmp_path / "nats", config=keys.server_config) as server:

            async def publish() -> None:
                access = build_access("learner", str(keys.path), RUN)
                async with connect(server.url, run=RUN, role="learner", worker="learner-1", **access) as bus:
                    await bus.publish(LIFE, b"x")

            async def reload() -> None:
                before = server.log_file.read_text().count("Reloaded")
                os.kill(server.pid, signal.SIGHUP)
                while server.log_file.read_text().count("Reloaded") == before:  # noqa: ASYNC110  # another process writes it
                    await anyio.sleep(0.01)

            async with connect(server.url, run=RUN, role="init", **build_access("init", str(keys.path), RUN)) as bus:
                await bus.declare(PLAN)
            for step in ("trust", "show", "forget"):
                assert renew_certificates(keys, days=2).step == step
                await publish()
                await reload()
                await publish()
            assert old not in keys.authority.read_bytes() and not (keys.path / NEXT).exists()
            keys.authority.write_bytes(old)
            with pytest.raises(UserError, match="certificate"):
                await publish()


def test_a_step_that_was_cut_off_is_taken_again(tmp_path: Path) -> None:
    keys = AuthFolder(tmp_path)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)
    assert renew_certificates(keys, days=2).step == "trust"
    before = keys.server_certificate.read_bytes()
    assert renew_certificates(keys, days=2).step == "show"
    keys.server_certificate.write_bytes(before)  # the key was written, the certificate was not
    assert [renew_certificates(keys, days=2).step for _ in range(2)] == ["show", "forget"]
    assert keys.server_key.stat().st_mode & 0o77 == 0 and keys.authority.stat().st_mode & 0o44 == 0o44


def test_a_step_that_nobody_was_told_of_is_told_again_before_the_next_is_taken(tmp_path: Path) -> None:
    keys = AuthFolder(tmp_path)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)

    def cut_off(step: RenewalStep) -> None:
        raise BrokenPipeError(step.step)

    told: list[str] = []
    for step in ("trust", "show", "forget"):
        for _ in range(2):
            with pytest.raises(BrokenPipeError, match=step):
                renew_certificates(keys, days=2, tell=cut_off)
        renew_certificates(keys, days=2, tell=lambda step: told.append(step.step))
    assert told == ["trust", "show", "forget"] and not (keys.path / NEXT).exists()


def test_an_authority_of_ones_own_without_a_last_line_end_stays_readable_beside_the_next_one(tmp_path: Path) -> None:
    keys = AuthFolder(tmp_path)
    write_folder(keys, [PLAN], hosts=["127.0.0.1"], days=1)
    keys.authority.write_bytes(keys.authority.read_bytes().rstrip())
    renew_certificates(keys, days=2)
    assert len(ssl.create_default_context(cafile=keys.authority).get_ca_certs()) == 2


@pytest.mark.parametrize(("days", "state"), [(1, "warning"), (400, "ok")])
def test_doctor_says_how_long_certificates_last(days: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(AuthFolder(tmp_path), [PLAN], hosts=["127.0.0.1"], days=days)
    configuration = Configuration(nats=NatsSettings(auth=str(tmp_path)))
    (found,) = check_certificates(configuration.nats.auth)
    assert (found.name, found.state) == ("certificates", state) and f"for {days} more days" in found.detail
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + (days + 1) * 86400)
    (found,) = check_certificates(configuration.nats.auth)
    assert found.state == "failed" and found.detail.endswith("fleetbus auth renew")
