"""Verifier code in its sandbox: verdicts, and what it can and cannot reach."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus_workers.environment.isolation.sandbox.backends import IsolationUnavailable, Kind, find_isolation
from fleetbus_workers.environment.isolation.verifier import Verifier
from tests.support.backends import asyncio_and_slow_trio
from tests.support.grading import LIMITS, Tools, grade

anyio_backend = asyncio_and_slow_trio


@pytest.fixture
async def verifier() -> AsyncIterator[Verifier]:
    verifier = Verifier(LIMITS)
    async with verifier.run():
        yield verifier


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
    "unknown parameter": ("def verify(env, answer): return 1", "'answer'; what it gets is named env, final_answer, conv"),
    "unknown keyword": ("def verify(env, *, seed): return 1", "has the parameter 'seed'"),
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


async def test_a_package_that_a_verifier_imports_is_refused_with_what_there_is(verifier: Verifier) -> None:
    reward, reason = await grade(verifier, "import numpy\ndef verify(env): return float(numpy.ones(1)[0])")
    assert reward is None
    assert "No module named 'numpy': verifiers import Python's standard library alone" in reason


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
    verifier = Verifier(LIMITS, kinds=kinds, sandbox="limits")
    async with verifier.run():
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
        async with Verifier(LIMITS, sandbox="required", kinds=()).run():
            raise AssertionError("not reached")


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
