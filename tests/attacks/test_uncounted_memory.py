"""Code in the sandbox uses memory that is not its own by name: shared memory, the device of zeros, buffers of sockets, names of
files, pages in pipes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, SandboxLimits, SandboxSession, find_isolation
from fleetbus_workers.environment.isolation.sandbox.backends import KINDS
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from tests.support.backends import asyncio_alone
from tests.support.processes import children, until

LIMITS = SandboxLimits(
    seconds=20.0, memory_bytes=1 << 30, total_memory_bytes=64 << 20, processes=12, file_bytes=512 << 20, scratch_bytes=512 << 20
)
FILL = """
import mmap, os, time
{opened}
for offset in range(0, len(memory), 1 << 20):
    memory[offset:offset + (1 << 20)] = b"x" * (1 << 20)
    {dropped}
time.sleep(15)
"""
ANONYMOUS = "memory = mmap.mmap(-1, 160 << 20)"
ZEROS = "memory = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 160 << 20)"
FILE = "file = open('/dev/shm/f', 'w+b'); file.truncate(100 << 20); memory = mmap.mmap(file.fileno(), 100 << 20)"
DROPPED = "memory.madvise(mmap.MADV_DONTNEED)"

anyio_backend = asyncio_alone


@pytest.fixture(params=KINDS)
async def session(request: pytest.FixtureRequest) -> AsyncIterator[SandboxSession]:
    try:
        isolation = await find_isolation((request.param,))
    except IsolationUnavailable as unavailable:
        pytest.skip(f"no {request.param} here: {unavailable}")
    watch = MemoryWatch()
    async with watch.run():
        session = SandboxSession(isolation, LIMITS, watch)
        yield session
        await session.close()
    await until(lambda: not children())


@pytest.mark.parametrize(
    ("opened", "dropped"),
    [(ANONYMOUS, ""), (ANONYMOUS, DROPPED), (ZEROS, ""), (ZEROS, DROPPED), (FILE, "")],
    ids=["anonymous", "anonymous, dropped", "device", "device, dropped", "file in memory"],
)
async def test_shared_memory_is_counted_or_refused(session: SandboxSession, opened: str, dropped: str) -> None:
    with anyio.fail_after(50):
        result = await session.run(FILL.format(opened=opened, dropped=dropped))
    refused = "PermissionError" in result.stderr or "OSError: [Errno 19]" in result.stderr
    assert refused or result.ended == "memory", result


STREAMS = """
import os, socket, time
os.fork(), os.fork()
pairs = []
for _ in range(50):
    pair = socket.socketpair()
    pairs.append(pair)
    for end in pair:
        end.setblocking(False)
        try:
            while True: end.send(bytes(100_000))
        except BlockingIOError: pass
time.sleep(15)
"""
CLOSED_SENDERS = """
import socket, time
receivers = []
for number in range(50):
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(f"/tmp/{number}")
    receivers.append(receiver)
    for _ in range(11):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                while True: sender.sendto(bytes(150_000), f"/tmp/{number}")
            except BlockingIOError: pass
time.sleep(15)
"""
FILES = """
import os, time
for number in range(1_000_000): os.mknod(f"/tmp/{number}")
time.sleep(15)
"""
HUGE_PAGES = """
import ctypes, os
reading, writing = os.pipe()
if ctypes.CDLL(None, use_errno=True).vmsplice(writing, None, 0, 0): raise OSError(ctypes.get_errno(), "refused")
"""


ASYNCHRONOUS_IO = """
import ctypes, os, time
library = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
for taken in range(4):
    context = ctypes.c_ulong(0)
    if library.syscall(number, 64, ctypes.byref(context)):
        raise OSError(ctypes.get_errno(), "refused")
print("taken")
"""


@pytest.mark.integration
@pytest.mark.parametrize("attack", [STREAMS, CLOSED_SENDERS, FILES], ids=["streams", "closed senders", "empty files"])
async def test_what_no_process_is_charged_for_is_counted(session: SandboxSession, attack: str) -> None:
    with anyio.fail_after(50):
        result = await session.run(attack)
    assert result.ended == "memory", result


async def test_pages_in_pipes_are_refused(session: SandboxSession) -> None:
    with anyio.fail_after(50):
        assert "PermissionError" in (await session.run(HUGE_PAGES)).stderr


async def test_what_the_whole_machine_has_of_asynchronous_io_is_refused(session: SandboxSession) -> None:
    with anyio.fail_after(50):
        result = await session.run(ASYNCHRONOUS_IO)
    assert "PermissionError" in result.stderr and "taken" not in result.stdout, result


async def test_no_socket_has_buffers_that_grow(session: SandboxSession) -> None:
    for family in ("AF_INET", "AF_INET6", "AF_VSOCK", "AF_ALG"):
        with anyio.fail_after(50):
            result = await session.run(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_STREAM)")
        assert "Address family not supported" in result.stderr, result


async def test_buffers_of_sockets_cannot_be_enlarged(session: SandboxSession) -> None:
    code = "import socket\na, b = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.{name}, 1 << 20)"
    for name in ("SO_SNDBUF", "SO_RCVBUF"):
        with anyio.fail_after(50):
            assert "PermissionError" in (await session.run(code.format(name=name))).stderr


async def test_ordinary_memory_and_the_device_of_zeros_still_work(session: SandboxSession) -> None:
    code = (
        "import mmap, multiprocessing, threading\n"
        "memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nmemory[:1] = b'x'\n"
        "thread = threading.Thread(target=print)\nthread.start()\nthread.join()\n"
        "print(open('/dev/zero', 'rb').read(4), multiprocessing.Value('i', 7).value)"
    )
    with anyio.fail_after(50):
        result = await session.run(code)
    assert result.stdout.strip() == repr(bytes(4)) + " 7", result
