"""Code of a policy looks for the source of its task's setup, comments with answers included."""

from __future__ import annotations

import anyio
import pytest

from fleetbus_schemas import Action, Task, ToolCall
from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, find_isolation
from fleetbus_workers.environment.specs import build_environment_factory
from tests.support.backends import asyncio_alone
from tests.support.tool_calls import NoGrader

anyio_backend = asyncio_alone

SETUP = "import linecache\n# the answer is 4711\ndef given(): return 1"
LOOK = """
import gc, inspect, linecache, sys
found = [str(linecache.cache)]
frame = sys._getframe()
while frame:
    found.append(str(frame.f_locals))
    frame = frame.f_back
found += [str(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple, str)) and len(str(each)) < 100_000]
try:
    found.append(inspect.getsource(given))
except Exception as error:
    found.append(str(error))
wanted = "answer is " + str(4700 + 11)
print("given", given(), "seen" if any(wanted in each for each in found) else "hidden")
"""


async def test_what_a_setup_says_is_not_kept() -> None:
    try:
        await find_isolation()
    except IsolationUnavailable as unavailable:
        pytest.skip(str(unavailable))
    factory = build_environment_factory("coding", verifier=NoGrader())
    with anyio.fail_after(50):
        async with factory.run():
            environment = factory()
            try:
                await environment.open(Task(key="t", prompt="p", config={"setup": SETUP}))
                await environment.reset()
                call = ToolCall(name="python", arguments={"code": LOOK})
                step = await environment.step(Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=(call,)))
            finally:
                await environment.close()
    assert "given 1 hidden" in str(step.messages[-1].content)
