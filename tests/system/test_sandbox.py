"""The coding sandbox: what code gets back, what it can reach, what it can use up, and that nothing of it stays.

Every test of escape runs in each isolation that this machine has; one that it lacks is skipped by name.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest

from fleetbus_workers.environment.isolation.sandbox import (
    ExecutionResult,
    Isolation,
    IsolationUnavailable,
    SandboxLimits,
    SandboxSession,
    find_isolation,
)
from fleetbus_workers.environment.isolation.sandbox.backends import KINDS, Kind
from fleetbus_workers.environment.isolation.sandbox.inside import confine
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.isolation.sandbox.session import SandboxFailed
from fleetbus_workers.environment.isolation.verifier.zygote import read_only  # type: ignore[attr-defined]
from fleetbus_workers.environment.ownership import build_label_variables, build_process_owner, sweep_abandoned_processes
from tests.support.processes import children, until, wait_for_output
from tests.support.server_labels import labels

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(
    seconds=20.0,
    memory_bytes=512 << 20,
    total_memory_bytes=768 << 20,
    processes=12,
    file_bytes=4 << 20,
    scratch_bytes=8 << 20,
    output_bytes=2000,
)


async def available(kind: Kind) -> Isolation:
    try:
        return await find_isolation((kind,))
    except IsolationUnavailable as unavailable:
        pytest.skip(f"no {kind} here: {unavailable}")


@pytest.fixture(params=KINDS)
async def isolation(request: pytest.FixtureRequest) -> Isolation:
    return await available(request.param)


@pytest.fixture
async def watch() -> AsyncIterator[MemoryWatch]:
    watch = MemoryWatch()
    async with watch.run():
        yield watch


@pytest.fixture
async def session(isolation: Isolation, watch: MemoryWatch) -> AsyncIterator[SandboxSession]:
    session = SandboxSession(isolation, LIMITS, watch)
    yield session
    await session.close()


async def run(session: SandboxSession, code: str, *, seconds: float | None = None) -> ExecutionResult:
    with anyio.fail_after(50):
        return await session.run(code, seconds=seconds)


async def test_code_gives_output_errors_and_an_exit_code_and_keeps_its_variables(session: SandboxSession) -> None:
    assert await run(session, "x = 20\nprint('hé')") == ExecutionResult(stdout="hé\n", stderr="", exit_code=0)
    assert (await run(session, "import sys\nprint(x + 1)\nprint('e', file=sys.stderr)")) == ExecutionResult(
        stdout="21\n", stderr="e\n", exit_code=0
    )
    failed = await run(session, "def divide():\n    return 1 / 0\ndivide()")
    assert failed.exit_code == 1
    assert failed.stderr.startswith('Traceback (most recent call last):\n  File "<code 3>", line 3')
    assert "return 1 / 0" in failed.stderr and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "runner.py" not in failed.stderr
    assert (await run(session, "exit(3)")).exit_code == 3
    assert (await run(session, "raise SystemExit('no')")) == ExecutionResult(stdout="", stderr="no\n", exit_code=1)
    assert (await run(session, "x = (")).exit_code == 1
    assert await run(
        session, "import subprocess\nprint(subprocess.run('echo $((x+2))', shell=True, capture_output=True).stdout)"
    )
    assert (await run(session, "import os; os.write(1, b'low')")).stdout == "low"
    assert (await run(session, "import threading\nt = threading.Thread(target=print, args=(x,)); t.start(); t.join()")).stdout
    assert (await run(session, "print(x)")).stdout == "20\n"


async def test_a_file_is_seen_at_a_path_that_leads_over_a_link(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "said.txt").write_text("hello")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    file = str(tmp_path / "here" / "said.txt")
    done = await anyio.run_process(isolation.command(["/bin/cat", file], visible=[file], tools=True), env={}, cwd="/")
    assert done.stdout == b"hello"


async def test_code_that_takes_too_long_is_stopped_and_its_variables_stay(session: SandboxSession) -> None:
    await run(session, "x = 1")
    stopped = await run(session, "import time\nprint('so far')\ntime.sleep(600)", seconds=2)
    assert (stopped.exit_code, stopped.stdout, stopped.ended) == (124, "so far\n", "")
    assert "took longer than 2 s" in stopped.stderr
    assert (await run(session, "print(x)")).stdout == "1\n"


async def test_code_that_cannot_be_stopped_from_within_is_killed(session: SandboxSession) -> None:
    await run(session, "x = 1")
    code = "import time\nprint('so far')\nwhile True:\n  try: time.sleep(600)\n  except BaseException: pass"
    killed = await run(session, code, seconds=2)
    assert (killed.exit_code, killed.stdout, killed.ended) == (124, "so far\n", "time")
    after = await run(session, "print('x' in globals())")
    assert (after.stdout, after.fresh) == ("False\n", True)


@pytest.mark.parametrize(("code", "exit_code"), [("import os; os._exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
async def test_an_interpreter_that_ends_is_replaced_and_the_next_code_is_told(
    session: SandboxSession, code: str, exit_code: int
) -> None:
    ended = await run(session, f"print('before')\n{code}")
    assert ended == ExecutionResult(stdout="before\n", stderr="", exit_code=exit_code, ended="exit")
    assert await run(session, "print(5)") == ExecutionResult(stdout="5\n", stderr="", exit_code=0, fresh=True)
    assert not (await run(session, "print(6)")).fresh


async def test_nothing_of_one_episode_is_seen_by_another(isolation: Isolation, watch: MemoryWatch) -> None:
    first, second = (SandboxSession(isolation, LIMITS, watch) for _ in range(2))
    try:
        await run(
            first, "import os\nx = 1\nopen('/tmp/left', 'w').write('x')\nif os.fork() == 0:\n  import time; time.sleep(600)"
        )
        assert (await run(second, "import os\nprint('left' in os.listdir('/tmp'), 'x' in globals())")).stdout == "False False\n"
        await first.close()
        assert (await run(second, "print(1)")).stdout == "1\n"
    finally:
        await first.close()
        await second.close()
    await until(lambda: not children())


LOOK_AROUND = """
import os
print(dict(os.environ))
for path in {paths!r}:
    print(path, os.path.exists(path))
print(sorted(set(os.listdir('/')) & {{'home', 'var', 'proc', 'sys', 'boot', 'run', 'srv', 'mnt', 'opt'}}))
print(os.listdir('/etc'), os.getpid() < 10)
"""


async def test_secret_files_and_variables_are_out_of_sight(
    isolation: Isolation, watch: MemoryWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETBUS_SECRET", "s3cret")
    secret = tmp_path / "key.fleetbus-secret"
    secret.write_text("s3cret")
    session = SandboxSession(isolation, LIMITS, watch)
    try:
        paths = [str(secret), str(tmp_path), str(Path(__file__)), "/etc/passwd", "/proc/1"]
        seen = await run(session, LOOK_AROUND.format(paths=paths))
    finally:
        await session.close()
    assert seen.exit_code == 0, seen.stderr
    assert "s3cret" not in seen.stdout and "FLEETBUS" not in seen.stdout
    assert all(f"{path} False" in seen.stdout for path in paths)
    assert "[]\n" in seen.stdout and seen.stdout.endswith(" True\n")


ESCAPES: dict[str, tuple[str, str]] = {
    "network": ("import socket; socket.create_connection(('1.1.1.1', 53), 5)", "Address family not supported"),
    "loopback": ("import socket; socket.create_server(('127.0.0.1', 0))", "Address family not supported"),
    "the host of a virtual machine": ("import socket; socket.socket(40, 1)", "Address family not supported"),
    "a pair of another family": ("import socket; socket.socketpair(30)", "Address family not supported"),
    "interfaces": ("import socket; raise OSError(socket.if_nameindex())", "[(1, 'lo')]"),
    "write outside": ("open('/usr/escaped', 'w')", "Error"),
    "write to Python": ("import json; open(json.__file__, 'a')", "Error"),
    "write to the root": ("open('/escaped', 'w')", "Error"),
    "mount": (
        "import ctypes\nif ctypes.CDLL(None).mount(b'a', b'/tmp', b'tmpfs', 0, None): raise OSError('refused')",
        "refused",
    ),
    "namespace": ("import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError('refused')", "refused"),
    "become root": ("import os\nos.setuid(0)", "Error"),
    "raise a limit": ("import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (99999, 99999))", "Error"),
    "trace": ("import ctypes, os\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0): raise OSError('refused')", "refused"),
    "shared memory": (
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) < 0: raise OSError('refused')",
        "refused",
    ),
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "file": ("open('/tmp/large', 'wb').write(bytes(5 << 20))", "File too large"),
    "files": ("for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(2 << 20))", "No space left"),
    "files in memory": ("for i in range(9): open(f'/dev/shm/{i}', 'wb').write(bytes(1 << 20))", "No space left"),
    "descriptors": ("f = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    "processes": ("import os\nfor _ in range(99):\n  if os.fork() == 0:\n    import time; time.sleep(600)", "BlockingIOError"),
    "fork bomb": (
        "import os, time\nuntil = time.time() + 5\nrefused = False\n"
        "while not refused and time.time() < until:\n  try: os.fork()\n  except OSError: refused = True\n"
        "if refused: raise OSError('refused')",
        "refused",
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
async def test_an_escape_is_refused_and_the_episode_goes_on(session: SandboxSession, name: str) -> None:
    code, words = ESCAPES[name]
    ran = await run(session, code)
    assert ran.exit_code == 1, ran
    assert words in ran.stderr
    assert (await run(session, "x = None\nprint('still here')")).stdout == "still here\n"


async def test_forged_answers_end_the_interpreter_and_nothing_else(session: SandboxSession) -> None:
    forge = (
        "import os, json, struct\np = json.dumps({'exit_code': 0, 'number': -1}).encode()\nfor fd in range(3, 64):\n"
        "  try:\n    while True: os.write(fd, struct.pack('!I', len(p)) + p)\n  except OSError: pass"
    )
    forged = await run(session, forge)
    assert (forged.exit_code, forged.ended) == (137, "exit")
    large = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'\\x00\\xff\\xff\\xff')\n  except OSError: pass"
    assert (await run(session, large)).ended == "exit"
    assert (await run(session, "print(1)")).stdout == "1\n"


async def test_gigabytes_of_output_are_cut_to_both_ends(session: SandboxSession) -> None:
    ran = await run(session, "import os\nprint('begin')\nfor _ in range(1 << 30): os.write(1, b'y' * 4096)")
    assert ran.exit_code == 1
    assert ran.stdout.startswith("begin\n") and "bytes cut" in ran.stdout and len(ran.stdout) < 2100
    assert "File too large" in ran.stderr
    assert (await run(session, "print('short')")).stdout == "short\n"


async def test_processes_that_together_use_too_much_memory_are_ended(session: SandboxSession) -> None:
    bomb = (
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
        "    x = bytearray(b'x') * (200 << 20)\n    time.sleep(600)\ntime.sleep(600)"
    )
    ended = await run(session, bomb)
    assert (ended.exit_code, ended.ended) == (137, "memory")
    assert (await run(session, "print(1)")).fresh


async def test_processor_time_is_bounded_for_the_whole_life_of_a_process(isolation: Isolation, watch: MemoryWatch) -> None:
    session = SandboxSession(isolation, SandboxLimits(cpu_seconds=1, seconds=40), watch)
    try:
        ended = await run(session, "while True: pass")
        assert (ended.exit_code, ended.ended) == (152, "exit"), "128 + SIGXCPU"
    finally:
        await session.close()


async def test_nothing_survives_the_episode(session: SandboxSession) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
        "    while True: time.sleep(1)\n  os._exit(0)\nos.wait()"
    )
    assert (await run(session, daemon)).exit_code == 0
    assert session.process_id is not None
    inside = psutil.Process(session.process_id).children(recursive=True)
    assert len(inside) >= 3
    await session.close()
    await until(lambda: not any(process.is_running() for process in inside))


async def test_cancelled_code_is_ended_and_leaves_no_process(session: SandboxSession) -> None:
    await session.open()
    with anyio.move_on_after(0.5):
        await session.run("import time; time.sleep(600)")
    await until(lambda: not children())
    assert (await run(session, "print(1)")).fresh


WORKER = """
import anyio
from fleetbus_workers.environment.isolation.sandbox import SandboxLimits, SandboxSession, find_isolation
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch

async def main():
    session = SandboxSession(await find_isolation(("{kind}",)), SandboxLimits(), MemoryWatch())
    await session.run("x = 1")
    print("running", flush=True)
    await session.run("while True: pass")

anyio.run(main)
"""


async def test_a_killed_worker_takes_its_sandboxes_with_it(isolation: Isolation) -> None:
    code = WORKER.format(kind=isolation.kind)
    async with await anyio.open_process([sys.executable, "-c", code], stderr=None) as worker:
        await wait_for_output(worker.stdout, b"running")
        processes = psutil.Process(worker.pid).children(recursive=True)
        assert any("FLEETBUS_SERVER_OWNER" in process.environ() for process in processes)
        worker.kill()
    await until(lambda: not any(process.is_running() for process in processes))


async def test_a_sandbox_that_its_killed_worker_left_is_found_by_its_owner(isolation: Isolation) -> None:
    """bubblewrap's first process waits without end if its starter is killed while it sets up the users."""
    mine = build_process_owner()
    gone = f"{mine.rpartition('_')[0]}_1"
    command = isolation.command(["/bin/sleep", "600"], tools=True)
    started = [
        await anyio.open_process(command, env=build_label_variables(labels(owner=owner)), cwd="/") for owner in (gone, mine)
    ]
    left, kept = (psutil.Process(process.pid) for process in started)
    try:
        await until(lambda: bool(left.children(recursive=True)))
        inside = left.children(recursive=True)
        assert str(left.pid) in sweep_abandoned_processes()
        await until(lambda: not any(process.is_running() for process in (left, *inside)))
        assert kept.is_running() and kept.status() != psutil.STATUS_ZOMBIE
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def test_where_nothing_isolates_one_line_says_what_to_do() -> None:
    with pytest.raises(IsolationUnavailable) as caught:
        await find_isolation(())
    assert "install bubblewrap" in str(caught.value) and "\n" not in str(caught.value)


async def test_programs_below_the_folder_that_is_empty_inside_are_seen(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout or a virtual environment may lie below /tmp."""
    from fleetbus_workers.environment.isolation.sandbox import backends as module

    with tempfile.TemporaryDirectory(dir="/tmp") as checkout:
        os.chmod(checkout, 0o755)
        inside = shutil.copytree(module.INSIDE, Path(checkout) / "inside")
        monkeypatch.setattr(module, "INSIDE", inside)
        assert module._find_leak(isolation) == ""


def test_an_isolation_that_does_not_isolate_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe looks for leaks itself: a bubblewrap that shares everything is not believed."""
    from fleetbus_workers.environment.isolation.sandbox import backends as module

    if sys.platform != "linux":
        pytest.skip("Linux only")
    monkeypatch.setattr(module, "_build_bubblewrap_arguments", lambda *_, **__: ["/usr/bin/env"])
    monkeypatch.setattr(Isolation, "command", lambda self, program, **_: [*program])
    assert "files of the host" in module._find_leak(Isolation(kind="bubblewrap", own_users=False))


async def test_an_interpreter_that_cannot_start_is_an_error(watch: MemoryWatch, isolation: Isolation) -> None:
    session = SandboxSession(isolation, SandboxLimits(scratch_bytes=-1), watch)
    with pytest.raises(SandboxFailed):
        await session.open()
    await until(lambda: not children())


@pytest.mark.parametrize("own_process", [0, 7])
@pytest.mark.parametrize("machine", confine.ARCHITECTURES)
def test_the_filter_of_system_calls_has_only_jumps_that_end_inside(machine: str, own_process: int) -> None:
    assert_jumps_end_inside(confine.compile_filter(machine, own_process=own_process))


@pytest.mark.parametrize("machine", confine.ARCHITECTURES)
def test_the_filter_of_changes_has_only_jumps_that_end_inside(machine: str) -> None:
    assert_jumps_end_inside(read_only.compile_read_only(machine))


def assert_jumps_end_inside(program: bytes) -> None:
    instructions = [program[index : index + 8] for index in range(0, len(program), 8)]
    for index, instruction in enumerate(instructions):
        if instruction[0] & 7 == 5:
            assert index + 1 + max(instruction[2], instruction[3]) < len(instructions)
    assert instructions[-1] == confine.ret(0x7FFF0000)
