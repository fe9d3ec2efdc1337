"""The connection under stress: nobody there, wrong keys, lost for good, stopped servers, deleted consumers, gaps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import nkeys
import pytest

from fleetbus.bus.nats import connect, connection, pull_requests, pull_subscription, reader, request_mux
from fleetbus.bus.nats.clock import ServerClock
from fleetbus.bus.nats.server import NatsServerProcess, run_server
from fleetbus.bus.streams import log_stream, tasks_consumer
from fleetbus.errors import BusClosed, BusError, NotPermitted, UserError
from fleetbus_schemas import Subjects
from tests.support.bare_nats import RUN, SUBJECTS, ready_bus

pytestmark = pytest.mark.integration

CONSUMER = tasks_consumer("default")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[NatsServerProcess]:
    async with run_server(tmp_path / "store") as server:
        yield server


async def test_nobody_at_the_address_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_SECONDS", 0.3)
    with anyio.fail_after(50), pytest.raises(UserError) as refused:
        async with connect("nats://me:secret@127.0.0.1:1", run=RUN):
            pass
    assert str(refused.value) == "no NATS server answers at nats://127.0.0.1:1: start one, or check --nats"


async def test_a_server_that_speaks_something_else_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_SECONDS", 0.5)

    async def greet(client: anyio.abc.SocketStream) -> None:
        async with client:
            await client.send(b"220 mail.example ESMTP\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, greet)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(UserError, match="no NATS server answers"):
            async with connect(f"nats://127.0.0.1:{port}", run=RUN):
                pass
        tasks.cancel_scope.cancel()


async def test_a_bad_address_is_a_user_error() -> None:
    with pytest.raises(UserError):
        async with connect("nats://127.0.0.1:notaport", run=RUN):
            pass


async def test_an_error_in_the_block_comes_out_as_itself(server: NatsServerProcess) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect(server.url, run=RUN):
            raise ZeroDivisionError


def _write_users(config: Path, *public_keys: str) -> None:
    users = ", ".join(f"{{nkey: {key}}}" for key in public_keys)
    config.write_text(f"authorization {{ users: [{users}] }}")


def _new_key(folder: Path, name: str) -> tuple[Path, str]:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    (folder / name).write_bytes(seed)
    return folder / name, nkeys.from_seed(bytearray(seed)).public_key.decode()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe"])
async def test_a_file_without_a_key_is_named(content: bytes, tmp_path: Path) -> None:
    key = tmp_path / "odd.nk"
    key.write_bytes(content)
    async with run_server(tmp_path / "store") as server:
        with pytest.raises(UserError, match=r"odd\.nk contains no nkey seed: write it again"):
            async with connect(server.url, run=RUN, nkey_seed=key):
                pass


async def test_a_key_that_is_gone_is_named_and_not_the_server(tmp_path: Path) -> None:
    """Removed between the check of the settings and the connection, it was told as a server that does not answer."""
    async with run_server(tmp_path / "store") as server:
        with pytest.raises(UserError, match=r"cannot read .*gone\.nk: No such file"):
            async with connect(server.url, run=RUN, nkey_seed=tmp_path / "gone.nk"):
                pass


async def test_keys_open_the_door_and_other_keys_do_not(tmp_path: Path) -> None:
    mine, my_key = _new_key(tmp_path, "mine")
    other, other_key = _new_key(tmp_path, "other")
    config = tmp_path / "server.conf"
    _write_users(config, my_key)
    async with run_server(tmp_path / "store", config=config) as server:
        async with ready_bus(server.url, nkey_seed=mine) as bus:
            await bus.publish(SUBJECTS.episode("e1"), b"x")
        for options in ({"nkey_seed": other}, {}):
            with anyio.fail_after(50), pytest.raises(UserError, match="refused the credentials"):
                async with connect(server.url, run=RUN, **options):  # type: ignore[arg-type]
                    pass
        with pytest.raises(BusClosed, match="credentials"):
            async with ready_bus(server.url, nkey_seed=mine):
                _write_users(config, other_key)
                await server.kill()
                await server.restart()
                await anyio.sleep_forever()


async def test_without_reconnect_a_lost_server_ends_the_block(server: NatsServerProcess) -> None:
    with anyio.fail_after(50), pytest.raises(BusClosed):
        async with connect(server.url, run=RUN, reconnect=False):
            await server.kill()
            await anyio.sleep_forever()


async def test_a_publish_that_outlives_the_block_ends_with_it(server: NatsServerProcess) -> None:
    async with anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def publish(bus: Any) -> None:
            with pytest.raises(BusClosed):
                await bus.publish(SUBJECTS.episode("e1"), b"x")
            with pytest.raises(BusClosed):
                await bus.publish(SUBJECTS.episode("e2"), b"x")
            ended.set()

        async with ready_bus(server.url) as bus:
            await server.kill()
            tasks.start_soon(publish, bus)
            await anyio.sleep(0.05)
        with anyio.fail_after(50):
            await ended.wait()


async def test_a_forbidden_subject_ends_the_block_with_an_error_that_names_it(tmp_path: Path) -> None:
    """Also where nobody waits for an answer, as with a broadcast."""
    config = tmp_path / "server.conf"
    config.write_text('authorization { users: [{user: a, password: b, permissions: {publish: {deny: "fbhb.>"}}}] }')
    async with run_server(tmp_path / "forbidding", config=config) as server:
        url = server.url.replace("//", "//a:b@")
        with anyio.fail_after(50), pytest.raises(NotPermitted, match=r"fbhb\.traps\.learner\.w") as caught:
            async with ready_bus(url) as bus:
                await bus.broadcast(SUBJECTS.heartbeat("learner", "w"), b"x")
                await anyio.sleep_forever()
    assert "a:b" not in str(caught.value)


async def test_a_bug_in_a_handler_ends_the_block_instead_of_the_read_loop(server: NatsServerProcess) -> None:
    def stumble(*message: object) -> None:
        raise ZeroDivisionError

    with anyio.fail_after(50), pytest.raises(ZeroDivisionError):
        async with connect(server.url, run=RUN) as bus:
            bus._connection.wire.open_route("stumble", stumble)  # type: ignore[attr-defined]
            await bus.broadcast("stumble", b"x")
            await anyio.sleep_forever()


async def test_a_stopped_server_is_left_and_found_again(server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WATCH_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(connection, "ROUND_TRIP_LIMITS_SECONDS", (0.2, 0.1))
    monkeypatch.setattr(connection, "PING_EVERY_SECONDS", 3600)
    async with ready_bus(server.url) as bus, bus.pull(CONSUMER, credits=3) as subscription:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(50):
                while bus._connection.wire.client.is_connected:  # noqa: ASYNC110  # as an outsider sees it
                    await anyio.sleep(0.01)
        finally:
            monkeypatch.undo()
            os.kill(server.pid, signal.SIGCONT)
        with anyio.fail_after(50):
            await bus.publish(SUBJECTS.task("default", "e1"), b"x")
            assert (await subscription.receive()).message.payload == b"x"


async def test_a_consumer_deleted_under_a_pull_is_named(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as bus, bus.pull(CONSUMER, credits=3) as subscription:
        async with anyio.create_task_group() as tasks:

            async def delete() -> None:
                while not (await bus._connection.api.ask(f"CONSUMER.INFO.{log_stream(RUN)}.{CONSUMER}"))["num_waiting"]:
                    await anyio.lowlevel.checkpoint()
                await bus._connection.api.ask(f"CONSUMER.DELETE.{log_stream(RUN)}.{CONSUMER}")

            tasks.start_soon(delete)
            with anyio.fail_after(50), pytest.raises(BusError, match=f"consumer {CONSUMER}"):
                await subscription.receive()


async def test_a_stream_that_does_not_exist_is_named(server: NatsServerProcess) -> None:
    async with connect(server.url, run="nothing") as bus:
        subjects = Subjects("nothing")
        with anyio.fail_after(50):
            async with bus.read([subjects.log]) as reading:
                with pytest.raises(BusError, match="stream fb_nothing"):
                    await reading.receive()
            with pytest.raises(BusError, match="fb_nothing"):
                await bus.last(subjects.episode("e1"))
            with pytest.raises(BusError, match="fb_nothing"):
                await bus.log_state()


async def test_expired_pull_requests_give_their_credits_back(
    server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_requests, "EXPIRES_SECONDS", 0.3)
    async with ready_bus(server.url) as bus, bus.pull(CONSUMER, credits=2) as subscription:
        line = subscription._pull_requests
        with anyio.fail_after(50):
            while line._count < 4:  # noqa: ASYNC110  # requests that have expired and were made anew
                await anyio.sleep(0.02)
        assert subscription.credits == 2
        for number in range(5):
            await bus.publish(SUBJECTS.task("default", f"e{number}"), b"x")
        with anyio.fail_after(50):
            for _ in range(2):
                await subscription.receive()
        with anyio.move_on_after(0.8) as waiting:
            await subscription.receive()
        assert waiting.cancelled_caught


PULLING = """
import sys
import anyio
from fleetbus.bus.nats import connect

async def pull():
    async with connect(sys.argv[1], run=sys.argv[2]) as bus, bus.pull(sys.argv[3], credits=2) as subscription:
        await subscription.receive()

anyio.run(pull)
"""


async def test_what_is_stored_while_a_puller_is_stopped_goes_to_others_at_once(server: NatsServerProcess) -> None:
    """A stopped process keeps its connection, and its pull requests with it, until they expire."""
    async with ready_bus(server.url) as bus:
        stopped = await anyio.open_process([sys.executable, "-c", PULLING, server.url, RUN, CONSUMER], stdout=None, stderr=None)
        try:
            with anyio.fail_after(50):
                await until_pulls_wait(bus, 1)
            stopped.send_signal(signal.SIGSTOP)
            with anyio.fail_after(50):
                await until_pulls_wait(bus, 0)
            await bus.publish(SUBJECTS.task("default", "e1"), b"x")
            async with bus.pull(CONSUMER, credits=1) as subscription:
                with anyio.fail_after(50):
                    assert (await subscription.receive()).delivered == 1
        finally:
            stopped.kill()
            await stopped.aclose()


async def until_pulls_wait(bus: Any, count: int) -> None:
    """Until so many pull requests wait at the server, twice in a row; it tells nobody when one expires."""
    seen = [-1, -1]
    while seen[-2:] != [count, count]:
        await anyio.sleep(0.1)
        found = await bus._connection.api.ask(f"CONSUMER.INFO.{log_stream(RUN)}.{CONSUMER}")
        seen.append(int(found.get("num_waiting", 0)))


async def test_pull_requests_that_the_server_lost_are_made_anew(
    server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_requests, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(pull_subscription, "_CHECK_EVERY_SECONDS", 0.05)
    async with ready_bus(server.url) as bus, bus.pull(CONSUMER, credits=2) as subscription:
        wire = bus._connection.wire
        await bus._connection.round_trip(2)
        wire.send(f"UNSUB {subscription._pull_requests._route}\r\n".encode())
        await bus._connection.round_trip(2)
        await bus.publish(SUBJECTS.task("default", "e1"), b"x")
        with anyio.fail_after(50):
            assert (await subscription.receive()).message.payload == b"x"
        assert subscription.credits == 1


async def test_a_gap_in_what_arrives_is_read_again(server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    genuine = reader.NatsReader._on_message

    def lossy(self: Any, subject: bytes, reply: bytes, payload: bytes) -> None:
        nonlocal taken
        taken += 1
        if taken % 37:
            genuine(self, subject, reply, payload)

    monkeypatch.setattr(reader.NatsReader, "_on_message", lossy)
    async with ready_bus(server.url) as bus:
        for number in range(200):
            await bus.publish(SUBJECTS.episode(f"e{number}"), b"x")
        with anyio.fail_after(50):
            assert [entry.sequence async for entry in bus.scan([SUBJECTS.log])] == list(range(1, 201))
    assert taken > 200


async def test_readers_leave_no_consumers_behind(server: NatsServerProcess) -> None:
    async with ready_bus(server.url) as bus:
        before = await _consumers(bus)
        await bus.publish(SUBJECTS.episode("e1"), b"x")
        async with bus.read([SUBJECTS.log]) as reading:
            await reading.receive()
            assert await _consumers(bus) == before + 1
        async for _ in bus.scan([SUBJECTS.log]):
            pass
        await bus._connection.round_trip(2)
        with anyio.fail_after(50):
            while await _consumers(bus) != before:
                await anyio.lowlevel.checkpoint()


async def _consumers(bus: Any) -> int:
    answer = await bus._connection.api.ask(f"STREAM.INFO.{log_stream(RUN)}")
    return int(answer["state"]["consumer_count"])


async def test_an_answer_that_never_comes_is_asked_for_again(
    server: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays up all the time: the first answer is simply lost."""
    monkeypatch.setattr("fleetbus.bus.nats.publisher.RESEND_SECONDS", 0.2)
    lost = 0
    genuine = request_mux.RequestMux._on_answer

    def lossy(self: Any, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        nonlocal lost
        if b'"stream"' in payload and not lost:
            lost += 1
            return
        genuine(self, subject, reply, payload, headers)

    async with ready_bus(server.url) as bus:
        monkeypatch.setattr(request_mux.RequestMux, "_on_answer", lossy)
        bus._connection.wire._handlers[1] = bus._connection.request_mux._on_answer
        with anyio.fail_after(50):
            published = await bus.publish(SUBJECTS.episode("e1"), b"x")
        assert (lost, published.duplicate) == (1, True)
        assert (await bus.log_state()).last_sequence == 1


def test_the_clock_trusts_the_shortest_round_trip_and_never_steps_back_by_little() -> None:
    clock = ServerClock()
    far = clock.now_ns() + 10**12
    clock.learn(1000, 5000, 3000 + far)
    clock.learn(10_000, 10_200, 10_100 + far + 700)
    assert clock._offset_ns == far + 700
    later = clock.now_ns()
    clock.forget()
    clock.learn(0, 2, 1 + far - 10**8)
    assert clock.now_ns() == later
