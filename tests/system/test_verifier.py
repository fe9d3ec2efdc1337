"""Verifier code in its sandbox: verdicts, limits, what it can and cannot reach, and that nothing is left behind."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from tests.support.processes import children, until, until_said
from workers.environment.sandbox.isolation import IsolationUnavailable, Kind, find_isolation
from workers.environment.verifier import Verifier, VerifierLimits
from workers.environment.verifier.sandbox import MAX_STARTS

LIMITS = VerifierLimits(seconds=30.0, cpu_seconds=1, memory_bytes=512 << 20)
CONVERSATION = [{"role": "user", "content": "What is é?"}]


class Tools:
    """What the code may ask for; `hang` until cancelled, `fail` with an error."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.hanging = anyio.Event()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked.append((name, arguments))
        if name == "hang":
            self.hanging.set()
            await anyio.sleep_forever()
        if name == "fail":
            raise LookupError("no such thing")
        return {"name": name, **arguments}

    async def query(self, sql: str, params: Sequence[Any]) -> Any:
        self.asked.append((sql, params))
        return [[82]]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    verifier = Verifier(LIMITS)
    async with verifier.running():
        yield verifier


async def grade(
    verifier: Verifier, code: str, *, answer: str | None = "82", tools: Tools | None = None
) -> tuple[float | None, str]:
    with anyio.fail_after(45):
        verdict = await verifier.verify(code, final_answer=answer, conversation=CONVERSATION, tools=tools or Tools())
    return verdict.reward, verdict.reason


def the_zygote() -> psutil.Process:
    """The warm process of the verifier, which may stand below those that isolate it."""
    return next(child for child in children() if "zygote.py" in " ".join(child.cmdline()[:6]))


VERDICTS: dict[str, tuple[str, float]] = {
    "a float": ("def verify(env): return 0.25", 0.25),
    "an int": ("def verify(env): return 1", 1.0),
    "a negative number": ("def verify(env): return -2", -2.0),
    "a bool": ("def verify(env): return True", 1.0),
    "another name": ("def _check(environment, final_answer):\n return final_answer == '82'", 1.0),
    "no parameters": ("def verify(): return 1", 1.0),
    "all parameters": ("def verify(env, final_answer, conversation): return 'é' in conversation[0]['content']", 1.0),
    "keyword only": ("def verify(env, *, conversation): return len(conversation)", 1.0),
    "any keywords": ("def verify(**given): return len(given)", 3.0),
    "helpers": ("def help(): return 3\ndef verify(env): return help()", 3.0),
    "a sync tool call": ("def verify(env): return env.call_tool('f', {'x': 5})['x']", 5.0),
    "a sync query": ("def verify(env): return env.query('SELECT ?', [1])[0][0]", 82.0),
    "an async tool call": ("async def verify(env): return (await env.call_tool('f'))['name'] == 'f'", 1.0),
    "an async query": ("async def verify(env): return (await env.query('SELECT 1'))[0][0]", 82.0),
    "a handled error": (
        "def verify(env):\n try: env.call_tool('fail')\n except Exception as e: return 'no such thing' in str(e)",
        1.0,
    ),
    "imports": (
        "import statistics, collections.abc\ndef verify(env):\n import fractions\n return statistics.mean([1, 2])",
        1.5,
    ),
    "a late import": ("import datetime\ndef verify(env): return datetime.datetime.strptime('2000', '%Y').year", 2000.0),
    "an event loop": (
        "import asyncio\nasync def verify(env):\n await asyncio.sleep(0.001)\n"
        " return (await asyncio.gather(env.query('a'), env.query('b')))[1][0][0]",
        82.0,
    ),
    "printing": (
        "import os\ndef verify(env):\n print('{\"reward\": 0}' * 100_000)\n os.write(1, b'x')\n os.write(2, b'x')\n return 1",
        1.0,
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
async def test_a_number_is_a_verdict(verifier: Verifier, name: str) -> None:
    code, expected = VERDICTS[name]
    reward, reason = await grade(verifier, code)
    assert reward == expected, reason


NO_VERDICTS: dict[str, tuple[str, str]] = {
    "exception": ("def verify(env):\n print('so far')\n raise KeyError('x')", "KeyError: 'x' (output: so far)"),
    "syntax error": ("def verify(:", "SyntaxError"),
    "null byte": ("def verify(): return 1\0", "null bytes"),
    "error at import": ("import no_such_module\ndef verify(env): return 1", "ModuleNotFoundError"),
    "no function": ("x = 1", "must define verify"),
    "two functions": ("def a(env): return 1\ndef b(env): return 1", "it defines a, b"),
    "unknown parameter": ("def verify(env, answer): return 1", "missing 1 required positional argument: 'answer'"),
    "None": ("def verify(env): pass", "returned NoneType"),
    "text": ("def verify(env): return '1'", "returned str"),
    "NaN": ("def verify(env): return float('nan')", "nan"),
    "infinity": ("def verify(env): return float('-inf')", "inf"),
    "too large": ("def verify(env): return 10 ** 400", "OverflowError"),
    "SystemExit": ("def verify(env): raise SystemExit(0)", "SystemExit"),
    "exit": ("import os\ndef verify(env): os._exit(3)", "exit code 3"),
    "signal": ("import os\ndef verify(env): os.kill(os.getpid(), 11)", "SIGSEGV"),
    "endless loop": ("def verify(env):\n while True: pass", "SIGXCPU"),
    "endless recursion": ("def verify(env): return verify(env)", "RecursionError"),
    "too much memory": ("def verify(env): return len(bytearray(1 << 30))", "MemoryError"),
    "waiting": (
        "class W:\n def __await__(self): yield\nasync def verify(env): await W()",
        "waits for something",
    ),
    "fork": ("import os\ndef verify(env):\n os.fork()\n return 1", "BlockingIOError"),
    "thread": (
        "import threading\ndef verify(env):\n threading.Thread(target=print).start()\n return 1",
        "can't start new thread",
    ),
    "file": (
        "import tempfile\ndef verify(env):\n with tempfile.TemporaryFile() as file: file.write(b'x')\n return 1",
        "No usable temporary directory",
    ),
    "protocol": ("import os\ndef verify(env):\n os.write(3, b'xxxxxxxx')\n return 1", "a message of"),
    "protocol, no JSON": ("import os\ndef verify(env):\n os.write(3, b'\\0\\0\\0\\x01x')\n return 1", "not a message"),
    "failed call": ("def verify(env): return env.call_tool('fail')", "LookupError: no such thing"),
    "foreign call": ("def verify(env): return env._ask('__init__', 1)", "nothing else"),
    "wrong call": ("def verify(env): return env.call_tool(3)", "nothing else"),
}


@pytest.mark.parametrize("name", NO_VERDICTS)
async def test_anything_else_is_no_verdict_and_never_a_zero(verifier: Verifier, name: str) -> None:
    code, words = NO_VERDICTS[name]
    reward, reason = await grade(verifier, code)
    assert reward is None
    assert words in reason


async def test_the_next_verification_does_not_notice_what_the_last_one_did(verifier: Verifier) -> None:
    spoil = (
        "import builtins, json, os\ndef verify(env):\n builtins.sorted = json.loads = None\n os.environ['X'] = '1'\n return 1"
    )
    assert (await grade(verifier, spoil))[0] == 1.0
    clean = "import os\ndef verify(env): return len(os.environ.get('X', ''))"
    assert (await grade(verifier, clean))[0] == 0.0


OPEN_DESCRIPTORS = """
import os
def is_open(descriptor):
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False
def verify(env):
    print(sorted(os.environ), [descriptor for descriptor in range(64) if is_open(descriptor)])
    return 1
"""


async def test_the_code_sees_no_environment_variables_and_no_descriptors_of_ours(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETBUS_SECRET", "s3cret")
    reward, output = await grade(verifier, OPEN_DESCRIPTORS)
    assert reward == 1.0
    assert "SECRET" not in output
    assert output.endswith("[0, 1, 2, 3]")


ZONE = Path("/usr/share/zoneinfo/Europe/Berlin")
ISOLATIONS: dict[str, tuple[Kind, ...]] = {"bubblewrap": ("bubblewrap",), "namespaces": ("namespaces",), "bare": ()}


@pytest.fixture(params=ISOLATIONS)
async def confined(request: pytest.FixtureRequest) -> AsyncIterator[Verifier]:
    """A verifier in each isolation that this machine has, and in none."""
    kinds = ISOLATIONS[request.param]
    if kinds:
        try:
            await find_isolation(kinds)
        except IsolationUnavailable as unavailable:
            pytest.skip(str(unavailable))
    elif sys.platform != "linux":
        pytest.skip("the filter of system calls needs Linux")
    verifier = Verifier(LIMITS, kinds=kinds)
    async with verifier.running():
        yield verifier


async def test_the_code_has_no_network_and_signals_nobody(confined: Verifier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\ndef verify(env):\n    socket.socket().connect(('127.0.0.1', {server.getsockname()[1]}))"
        assert "PermissionError" in (await grade(confined, connect))[1]
    assert "PermissionError" in (await grade(confined, "import os\ndef verify(env): os.kill(os.getppid(), 9)"))[1]
    assert "PermissionError" in (await grade(confined, "import os\ndef verify(env): os.kill(-1, 9)"))[1]
    assert (await grade(confined, "def verify(env): return 1"))[0] == 1.0


async def test_the_code_sees_no_file_of_the_host_and_writes_none(confined: Verifier, tmp_path: Path) -> None:
    """Where there is neither isolation nor Landlock, a verifier under root is at least not root."""
    secret = tmp_path / "key"
    secret.write_text("s3cret")
    assert (await grade(confined, "def verify(env): return 1"))[0] == 1.0
    if not confined.hides_files:
        if os.geteuid() != 0:
            pytest.skip("without isolation and Landlock, verifiers of a worker that is not root read its files")
        secret.chmod(0o600)
    for action in (f"open({str(secret)!r}).read()", f"os.listdir({str(tmp_path)!r})", f"open({str(tmp_path / 'new')!r}, 'w')"):
        reward, reason = await grade(confined, f"import os\ndef verify(env): return len({action})")
        assert reward is None
        assert "PermissionError" in reason or "FileNotFoundError" in reason or not confined.hides_files, action
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not ZONE.exists(), reason="this machine has no time zones")
async def test_the_code_has_python_s_library_and_time_zones(confined: Verifier) -> None:
    code = (
        "import zoneinfo, datetime, decimal, xml.dom.minidom\ndef verify(env):\n import sqlite3, colorsys\n"
        " return datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')).utcoffset().seconds / 3600"
    )
    assert await grade(confined, code) == (2.0, "")


async def test_grading_where_nothing_isolates_can_be_forbidden() -> None:
    with pytest.raises(IsolationUnavailable, match="no sandbox works here"):
        async with Verifier(LIMITS, required=True, kinds=()).running():
            raise AssertionError("not reached")


async def test_a_verification_that_takes_too_long_ends_without_a_verdict() -> None:
    verifier = Verifier(VerifierLimits(seconds=2.0))
    async with verifier.running():
        reward, reason = await grade(verifier, "import time\ndef verify(env): time.sleep(60)")
        assert (reward, reason) == (None, "no verdict within 2 s")
        assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    await until(lambda: not children())


async def test_a_cancelled_verification_kills_its_process(verifier: Verifier) -> None:
    tools = Tools()
    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    zygote = the_zygote()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(grade, verifier, "def verify(env): return env.call_tool('hang')")
        tasks.start_soon(lambda: grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))
        with anyio.fail_after(50):
            await tools.hanging.wait()
        tasks.cancel_scope.cancel()
    await until(lambda: not zygote.children())
    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0


async def test_many_at_a_time_get_their_own_answers(verifier: Verifier) -> None:
    results: dict[int, float | None] = {}

    async def one(index: int) -> None:
        results[index] = (await grade(verifier, f"def verify(env, final_answer): return int(final_answer) + {index}"))[0]

    async with anyio.create_task_group() as tasks:
        for index in range(40):
            tasks.start_soon(one, index)
    assert results == {index: 82.0 + index for index in range(40)}


async def test_a_large_conversation_and_a_large_result_pass(verifier: Verifier) -> None:
    class Large(Tools):
        async def query(self, sql: str, params: Sequence[Any]) -> Any:
            return ["y" * 2_000_000, params]

    code = "def verify(env, final_answer): return len(env.query('x', ['z' * 1_000_000])[0]) + len(final_answer)"
    assert (await grade(verifier, code, answer="x" * 3_000_000, tools=Large()))[0] == 5_000_000.0


async def test_a_killed_process_is_replaced(verifier: Verifier) -> None:
    tools = Tools()
    outcome: list[tuple[float | None, str]] = []

    async def interrupted() -> None:
        outcome.append(await grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))

    assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
    zygote = the_zygote()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupted)
        with anyio.fail_after(50):
            await tools.hanging.wait()
        running = zygote.children()
        zygote.kill()
        assert (await grade(verifier, "def verify(env): return 1"))[0] == 1.0
        tasks.cancel_scope.cancel()
    assert running
    assert not outcome or outcome[0][0] is None
    await until(lambda: not any(child.is_running() for child in running))


@pytest.mark.parametrize("deaths", [1, 99])
async def test_a_process_that_dies_while_it_starts_is_started_again_a_few_times(deaths: int, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.write_text("x" * deaths)
    mortal = tmp_path / "mortal.py"
    mortal.write_text(
        f"import os, runpy, sys\nleft = {str(left)!r}\n"
        "if os.path.getsize(left):\n os.truncate(left, os.path.getsize(left) - 1)\n sys.exit(1)\n"
        f"runpy.run_path({str(Verifier.program)!r}, run_name='__main__')\n"
    )

    class MortalVerifier(Verifier):
        program = mortal

    verifier = MortalVerifier(LIMITS, kinds=())
    async with verifier.running():
        reward, reason = await grade(verifier, "def verify(env): return 1")
    assert (reward, reason) == (
        (1.0, "") if deaths == 1 else (None, "the process that runs verifiers dies as soon as it is started")
    )
    assert left.stat().st_size == max(deaths - MAX_STARTS, 0)
    assert not children()


async def test_nothing_is_left_behind_at_the_end() -> None:
    verifier = Verifier(LIMITS)
    with anyio.move_on_after(30):
        async with verifier.running(), anyio.create_task_group() as tasks:
            tools = Tools()
            tasks.start_soon(lambda: grade(verifier, "def verify(env): return env.call_tool('hang')", tools=tools))
            await tools.hanging.wait()
            assert children()
            tasks.cancel_scope.cancel()
    await until(lambda: not children())


WORKER = """
import anyio, sys
from workers.environment.sandbox.isolation import IsolationUnavailable, Kind, find_isolation
from workers.environment.verifier import Verifier

class Tools:
    async def call_tool(self, name, arguments):
        print("asked", flush=True)
        await anyio.sleep_forever()

async def main():
    verifier = Verifier()
    async with verifier.running():
        code = "def verify(env): return env.call_tool('hang')"
        await verifier.verify(code, final_answer=None, conversation=[], tools=Tools())

anyio.run(main)
"""


async def test_a_killed_worker_takes_its_verifications_with_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER], stderr=None) as worker:
        await until_said(worker.stdout, b"asked")
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert len(processes) >= 2, "the warm process and one child"
    await until(lambda: not any(process.is_running() for process in processes))


async def test_signals_of_the_terminal_do_not_reach_the_verifications(verifier: Verifier) -> None:
    await grade(verifier, "def verify(env): return 1")
    zygote = the_zygote()
    assert os.getsid(zygote.pid) != os.getsid(0)


async def test_verifying_outside_of_running_is_refused() -> None:
    with pytest.raises(RuntimeError, match="running"):
        await Verifier().verify("def verify(): return 1", final_answer=None, conversation=[], tools=Tools())
