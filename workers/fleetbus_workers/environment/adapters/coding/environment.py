"""Coding as an environment: the policy writes Python, reads the output, and continues in the same interpreter.

Above it is the session of an environment worker; below it one sandbox per episode and a verifier. Code comes as a call of the
tool ``python`` or as a fenced block. All that the code does is an observation; only a sandbox that cannot be started ends the
episode. A task's config may hold ``setup`` (code that runs before the episode begins) and ``seconds`` (for each piece of code).
"""

import re
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

from fleetbus.core.text.prompts import TOOL_RESULT, build_compact_system_prompt, build_fleet_system_prompt, truncate_text
from fleetbus.core.text.tool_calls import final_answer, is_done
from fleetbus_schemas import Action, ChatMessage, Task, ToolOutput, ToolSpec
from fleetbus_workers.environment.adapters.common.fresh_python import FreshPython, build_state, read_code
from fleetbus_workers.environment.adapters.common.tool_results import (
    answer_first_call,
    build_tool_messages,
    extract_source,
    is_final_answer,
    read_final_answer,
)
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.isolation.sandbox import ExecutionResult, SandboxSession
from fleetbus_workers.environment.isolation.verifier.base import Grader, grade

TOOL = ToolSpec(
    name="python",
    description="Execute Python code; variables stay until the end. Gives standard output, standard error and the exit code.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source; print what you want to see"}},
        "required": ["code"],
    },
)
NO_CODE = 'No code found. Call the tool "python", or write the code between ```python and ```.'
_FENCED = re.compile(r"```(?:python|py)[ \t]*\r?\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


class CodingEnvironment:
    """One episode with an interpreter. ``observation_bytes`` bounds each observation's text."""

    replayable = False

    def __init__(
        self,
        make_session: Callable[[], SandboxSession],
        *,
        grader: Grader,
        prompt: str = "compact",
        observation_bytes: int = 32_768,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._make_session = make_session
        self._grader = grader
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._today = today
        self._task: Task | None = None
        self._seconds: float | None = None
        self._session: SandboxSession | None = None
        self._conversation: list[ChatMessage] = []
        self._answer: str | None = None
        self._executed = self._failed = 0
        self._has_reported_loss = False

    async def open(self, task: Task) -> None:
        """Start the interpreter and run the task's setup. Raises `EnvironmentFailed` if that fails."""
        seconds, setup = task.config.get("seconds"), task.config.get("setup")
        if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
            raise EnvironmentFailed(f"task {task.key}: seconds is {seconds!r}; it must be a number above 0")
        if setup is not None and not isinstance(setup, str):
            raise EnvironmentFailed(f"task {task.key}: setup must be Python source")
        self._task, self._seconds = task, seconds
        self._session = self._make_session()
        await self._session.open()
        if setup:
            result = await self._session.run(setup, seconds=seconds, hidden=True)
            if result.exit_code:
                last = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.exit_code}"]
                raise EnvironmentFailed(f"the setup of task {task.key} failed: {last[0]}")

    async def reset(self) -> Start:
        assert self._task is not None
        messages = [ChatMessage(role="user", content=self._task.prompt)]
        if self._prompt == "fleet":
            system = build_fleet_system_prompt((TOOL,), today=self._today(), env_variables=self._task.env_variables)
            messages.insert(0, ChatMessage(role="system", content=system))
        elif self._prompt != "template":
            messages.insert(0, ChatMessage(role="system", content=build_compact_system_prompt((TOOL,))))
        self._conversation = list(messages)
        tools = (TOOL,) if self._prompt == "template" else ()
        return Start(messages=tuple(messages), tools=tools, prompted=len(messages) - 1, offered=(TOOL,))

    async def step(self, action: Action) -> Step:
        """Execute the first piece of code of the action, if any; then the episode is over if the action says so."""
        if self._prompt != "template":
            return await self._execute(action)
        if is_final_answer(action):
            self._conversation.append(ChatMessage(role="assistant", content=action.text))
            self._answer = read_final_answer(action)
            return Step(terminated=True)
        if not action.tool_calls:
            return Step(messages=build_tool_messages(action, ()))
        return answer_first_call(action, await self._execute(action))

    async def _execute(self, action: Action) -> Step:
        assert self._session is not None
        done = is_done(action.text)
        self._conversation.append(ChatMessage(role="assistant", content=action.text))
        if done:
            self._answer = final_answer(_FENCED.sub("", action.text))
        code, problem, more = extract_source(action, TOOL, _FENCED, NO_CODE)
        if code is None and done:
            return Step(terminated=True)
        failed = code is None
        text = problem
        if code is not None:
            result = await self._session.run(code, seconds=self._seconds)
            failed, text = (
                result.exit_code != 0,
                _format_observation(result, report_loss=result.fresh and not self._has_reported_loss),
            )
            self._has_reported_loss = bool(result.ended)
            self._executed += 1
            self._failed += failed
        message = ChatMessage(role="user", content=truncate_text(text, self._observation_bytes - len(more)) + more)
        self._conversation.append(message)
        return Step(
            messages=() if done else (message,),
            terminated=done,
            tool_calls=int(code is not None),
            tool_errors=int(failed and code is not None),
            output=ToolOutput(text=truncate_text(text, self._observation_bytes), failed=failed),
        )

    async def state(self) -> dict[str, Any]:
        return {
            "task": self._task.key if self._task else "",
            "messages": len(self._conversation),
            "executed": self._executed,
            "failed": self._failed,
            "answer": self._answer,
        }

    async def verify(self) -> Verdict:
        """The verdict of the task's verifier, which may run code of its own (see `call_tool`)."""
        return await grade(self._grader, self._task, final_answer=self._answer, conversation=self._conversation, tools=self)

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any:
        """For the verifier: ``python`` runs code in the episode's interpreter, ``python_fresh`` and ``python_call`` in one of
        their own, which the policy's code cannot have prepared (`FreshPython`). All give what `build_state` says."""
        if name == TOOL.name and self._session is not None:
            return build_state(await self._session.run(read_code(name, arguments), seconds=self._seconds))
        return await FreshPython(self._make_session, self._seconds).call_tool(name, arguments)

    async def query(self, sql: str, params: Sequence[Any]) -> object:
        raise LookupError("a coding environment has no database")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _format_observation(result: ExecutionResult, *, report_loss: bool) -> str:
    notes = {
        "": "",
        "time": "\n[the code did not stop in time: the interpreter was ended, its variables are lost]",
        "memory": "\n[too much memory was used: the interpreter was ended, its variables are lost]",
        "exit": "\n[the interpreter ended, its variables are lost]",
    }
    error = f"\n[stderr]\n{result.stderr.rstrip()}" if result.stderr else ""
    code = f"\n[exit code {result.exit_code}]" if result.exit_code else ""
    before = "[the interpreter was ended before this code: its variables are lost]\n" if report_loss else ""
    text = f"{before}{result.stdout.rstrip()}{error}{code}{notes[result.ended]}".strip("\n")
    return TOOL_RESULT + (text or "(no output)")
