"""The policy's code tries to forge its reward: it exits before the tests, reads pass words, writes to every descriptor, lies.

Each forgery is tried on verifiers as they come naturally (of which `fleetbus tasks validate` has to warn, as the code shares
their interpreter) and on the same verifier by the rules of docs/environments.md, where none may succeed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from fleetbus.core.text.verifier_warnings import find_forgeable
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, find_isolation
from fleetbus_workers.environment.isolation.verifier import Verifier, VerifierLimits
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_and_slow_trio
from tests.support.processes import children, until

anyio_backend = asyncio_and_slow_trio


TESTS = "assert add(1, 2) == 3\\nassert add(-1, 1) == 0\\n"
SOLUTION = (
    "[m for m in conversation if m['role'] == 'assistant'][-1]['content'].split('```python\\n')[1].split('\\n```')[0] + '\\n'"
)

EXIT_CODE = f"""
async def verify(env, conversation):
    code = {SOLUTION} + "{TESTS}"
    return (await env.call_tool("python_fresh", {{"code": code}}))["exit_code"] == 0
"""
PASS_WORD = f"""
import secrets
async def verify(env, conversation):
    word = secrets.token_hex()
    code = {SOLUTION} + "{TESTS}print('" + word + "')"
    return word in (await env.call_tool("python_fresh", {{"code": code}}))["stdout"]
"""
PRINTED = f"""
import json
async def verify(env, conversation):
    code = {SOLUTION} + "import json; print(json.dumps([add(1, 2) == 3, add(-1, 1) == 0]))"
    answer = await env.call_tool("python_fresh", {{"code": code}})
    return float(all(json.loads(answer["stdout"].splitlines()[-1])))
"""
EPISODE = """
async def verify(env):
    answer = await env.call_tool("python", {"code": "print(add(1, 2), add(-1, 1))"})
    return answer["stdout"] == "3 0\\n"
"""
IN_THE_GRADER = f"""
def verify(env, conversation):
    scope = {{}}
    exec({SOLUTION}, scope)
    return scope["add"](1, 2) == 3 and scope["add"](-1, 1) == 0
"""
NATURAL = {
    "exit code": EXIT_CODE,
    "pass word": PASS_WORD,
    "printed": PRINTED,
    "episode": EPISODE,
    "in the grader": IN_THE_GRADER,
}
BY_THE_RULES = f"""
CASES = [([1, 2], 3), ([-1, 1], 0)]

async def verify(env, conversation):
    asked = {{"code": {SOLUTION}, "function": "add", "arguments": [case for case, _ in CASES]}}
    answer = await env.call_tool("python_call", asked)
    return float(all(got["value"] == right for got, (_, right) in zip(answer["results"], CASES)))
"""
HONEST = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
FORGERIES = {
    "nothing but wrong": WRONG,
    "os._exit(0)": "import os\nos._exit(0)",
    "os._exit(0) when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "sys.exit(0) when called": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "an own exec": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(\"[true, true]\")'])",
    "equal to all": (
        "class All:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b):\n    return All()"
    ),
    "a number that is equal to all": (
        "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b):\n    return All(7)"
    ),
    "words of the runner's frames": (
        "import linecache, os, sys\n"
        "def words():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for value in [*frame.f_locals.values(), *linecache.cache.values()]:\n"
        "            yield str(value)\n"
        "        frame = frame.f_back\n"
        "print('\\n'.join(words()))\nprint('[true, true]', flush=True)\n"
        "def add(a, b):\n    print('\\n'.join(words()), flush=True)\n    os._exit(0)"
    ),
    "results on every descriptor": (
        "import json, os, struct\n"
        "def flood():\n"
        "    for number in range(64):\n"
        "        for message in ({'reward': 1.0}, {'exit_code': 0, 'number': number, 'value': '3', 'result': 3}):\n"
        "            payload = json.dumps(message).encode()\n"
        "            for descriptor in range(32):\n"
        "                try: os.write(descriptor, struct.pack('!I', len(payload)) + payload)\n"
        "                except OSError: pass\n"
        "flood()\n"
        "def add(a, b):\n    flood()\n    os._exit(0)"
    ),
    "a print of its own": ("import builtins, os\nbuiltins.print = lambda *_: os.write(1, b'3 0\\n')\ndef add(a, b): return 7"),
    "another json": "import json\njson.dumps = lambda value: '3'\ndef add(a, b): return 3",
}


@pytest.fixture
async def make() -> AsyncIterator[EnvironmentFactory]:
    try:
        await find_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    verifier = Verifier(VerifierLimits(seconds=40))
    factory = build_environment_factory("coding", verifier=verifier)
    async with verifier.run(), factory.run():
        yield factory
    await until(lambda: not children())


async def play(make: EnvironmentFactory, verifier: str, solution: str) -> float | None:
    """The reward of an episode in which the policy gives ``solution`` as its only turn."""
    environment = make()
    text = f"```python\n{solution}\n```\n<done>"
    with anyio.fail_after(55):
        try:
            await environment.open(Task(key="t", prompt="Define add.", verifier=verifier))
            await environment.reset()
            await environment.step(Action(episode_id="e", attempt=1, turn=0, text=text))
            return (await environment.verify()).reward
        finally:
            await environment.close()


@pytest.mark.parametrize("solution", FORGERIES.values(), ids=FORGERIES.keys())
async def test_a_verifier_by_the_rules_cannot_be_forged(make: EnvironmentFactory, solution: str) -> None:
    assert await play(make, BY_THE_RULES, solution) == 0.0


async def test_work_that_is_right_passes_every_verifier(make: EnvironmentFactory) -> None:
    for verifier in (BY_THE_RULES, EXIT_CODE, PASS_WORD, PRINTED, EPISODE):
        assert await play(make, verifier, HONEST) == 1.0


@pytest.mark.parametrize("name", ["os._exit(0)", "os._exit(0) when called", "sys.exit(0)", "sys.exit(0) when called"])
async def test_an_early_exit_never_counts_as_passed_tests(make: EnvironmentFactory, name: str) -> None:
    assert await play(make, EXIT_CODE, FORGERIES[name]) == 0.0


@pytest.mark.parametrize(
    ("verifier", "name"),
    [(PASS_WORD, "words of the runner's frames"), (PRINTED, "an own exec"), (EPISODE, "a print of its own")],
)
async def test_the_forgeries_do_succeed_on_verifiers_that_are_warned_of(
    make: EnvironmentFactory, verifier: str, name: str
) -> None:
    assert await play(make, verifier, FORGERIES[name]) == 1.0, "this attack attacks nothing"
    assert find_forgeable(verifier)


@pytest.mark.parametrize("verifier", NATURAL.values(), ids=NATURAL.keys())
def test_verifiers_that_can_be_forged_are_warned_of(verifier: str) -> None:
    assert len(find_forgeable(verifier)) == 1


def test_a_verifier_by_the_rules_is_not_warned_of() -> None:
    assert find_forgeable(BY_THE_RULES) == []
