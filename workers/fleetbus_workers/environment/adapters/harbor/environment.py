"""Harbor tasks as an environment: the policy works in a shell of the task's box, its tests enter when it has finished.

Above it is the session of an environment worker; below it a box per episode (a container, or the sandbox). A command comes as a
call of the tool ``bash`` or as a fenced block; an answer that says that it is done ends the task, or its step. What commands do
is an observation; only a box that cannot be had ends the episode.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from fleetbus.core.text.prompts import TOOL_RESULT, build_compact_system_prompt, truncate_text
from fleetbus.core.text.tool_calls import is_done
from fleetbus.tasks.harbor import HarborStep, HarborTask, Healthcheck
from fleetbus_schemas import Action, ChatMessage, Task, ToolOutput, ToolSpec
from fleetbus_workers.environment.adapters.common.tool_results import (
    answer_first_call,
    build_tool_messages,
    extract_source,
    is_final_answer,
)
from fleetbus_workers.environment.adapters.harbor.box import SOLUTION, Box, CommandResult
from fleetbus_workers.environment.adapters.harbor.grading import Grade
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict

TOOL = ToolSpec(
    name="bash",
    description="Run a shell command. Gives its output and exit code; files and background processes stay.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "A command line for bash"}},
        "required": ["command"],
    },
)
NO_COMMAND = 'No command found. Call the tool "bash", write it between ```bash and ```, or say <done>.'
_FENCED = re.compile(r"```(?:bash|sh|shell)[ \t]*\r?\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)

OpenBox = Callable[[HarborTask], Awaitable[Box]]
GradeStep = Callable[[HarborTask, Box, HarborStep], Awaitable[Grade]]


class HarborEnvironment:
    """One episode. ``find`` gives the folder of a task, ``open_box`` a box of it, ``grade`` the rewards of a step."""

    replayable = False

    def __init__(
        self,
        find: Callable[[Task], Awaitable[HarborTask]],
        open_box: OpenBox,
        grade: GradeStep,
        *,
        prompt: str,
        observation_bytes: int,
        command_seconds: float,
    ) -> None:
        self._find = find
        self._open_box = open_box
        self._grade_step = grade
        self._prompt = prompt
        self._observation_bytes = observation_bytes
        self._command_seconds = command_seconds
        self._harbor: HarborTask | None = None
        self._box: Box | None = None
        self._position = 0
        self._rewards: list[float] = []
        self._problem = ""
        self._over = False
        self._step_began = 0.0
        self._commands = self._failed = 0

    @property
    def _current(self) -> HarborStep:
        assert self._harbor is not None
        return self._harbor.steps[self._position]

    @property
    def box(self) -> Box:
        """The episode's box; raises `EnvironmentFailed` before `open` and after `close`."""
        if self._box is None:
            raise EnvironmentFailed("the episode has no box")
        return self._box

    async def open(self, task: Task) -> None:
        """Start the box, and wait until it is healthy. Raises `EnvironmentFailed` and `UserError`."""
        self._harbor = await self._find(task)
        self._box = await self._open_box(self._harbor)
        await self._begin_step()

    async def reset(self) -> Start:
        self._step_began = anyio.current_time()
        messages = [ChatMessage(role="user", content=self._current.instruction)]
        if self._prompt != "template":
            messages.insert(0, ChatMessage(role="system", content=build_compact_system_prompt((TOOL,))))
        tools = (TOOL,) if self._prompt == "template" else ()
        return Start(messages=tuple(messages), tools=tools, prompted=len(messages) - 1, offered=(TOOL,))

    async def step(self, action: Action) -> Step:
        """Run the first command of the action, if any; then the step of the task is over if the action says so: by
        ``<done>``, or by having no call where the model's own template writes tools."""
        limit = self._current.agent.timeout_sec or float("inf")
        left = limit - (anyio.current_time() - self._step_began)
        own_template = self._prompt == "template"
        if left <= 0:
            step = await self._finish_step("the time for this is over", timed_out=True)
        elif not own_template:
            return await self._run_command(action, left, done=is_done(action.text))
        elif is_final_answer(action):
            return await self._finish_step("")
        elif not action.tool_calls:
            return Step(messages=build_tool_messages(action, ()))
        else:
            step = await self._run_command(action, left, done=False)
        return answer_first_call(action, step) if own_template and action.tool_calls else step

    async def _run_command(self, action: Action, left: float, *, done: bool) -> Step:
        command, problem, more = extract_source(action, TOOL, _FENCED, NO_COMMAND)
        text, failed = problem, True
        if command is not None:
            seconds = min(left, self._command_seconds)
            result = await self.box.run(command, user=self._current.agent.user, variables={}, seconds=seconds)
            failed, text = result.exit_code != 0, _format_observation(result)
            self._commands += 1
            self._failed += failed
        ran, errors = int(command is not None), int(failed and command is not None)
        if done:
            return await self._finish_step("", tool_calls=ran, tool_errors=errors)
        message = ChatMessage(role="user", content=truncate_text(text, self._observation_bytes - len(more)) + more)
        output = ToolOutput(text=truncate_text(text, self._observation_bytes), failed=failed)
        return Step(messages=(message,), tool_calls=ran, tool_errors=errors, output=output)

    async def _finish_step(self, note: str, *, timed_out: bool = False, tool_calls: int = 0, tool_errors: int = 0) -> Step:
        """Grade a step and continue with the next one; the last one is graded by `verify`."""
        assert self._harbor is not None
        last = self._position + 1 == len(self._harbor.steps)
        if last or not await self._settle_step():
            self._over = not last
            return Step(terminated=not timed_out, truncated=timed_out, tool_calls=tool_calls, tool_errors=tool_errors)
        self._position += 1
        await self._begin_step()
        self._step_began = anyio.current_time()
        text = f"{note}\n\n{self._current.instruction}".strip()
        return Step(messages=(ChatMessage(role="user", content=text),), tool_calls=tool_calls, tool_errors=tool_errors)

    async def _settle_step(self) -> bool:
        """True if the current step was good enough to continue."""
        assert self._harbor is not None
        grade = await self._grade_step(self._harbor, self.box, self._current)
        if grade.reward is None:
            self._problem = f"step {self._current.name}: {grade.reason}" if self._current.name else grade.reason
            return False
        self._rewards.append(grade.reward)
        return not grade.find_shortfall(self._current.min_reward)

    async def _begin_step(self) -> None:
        assert self._harbor is not None
        step = self._current
        if step.workdir is not None:
            await self.box.put(step.workdir, self._harbor.config.environment.workdir or "/app")
        if self._position == 0 and self._harbor.config.environment.healthcheck is not None:
            await self._wait_until_healthy(self._harbor.config.environment.healthcheck)
        if step.healthcheck is not None:
            await self._wait_until_healthy(step.healthcheck)

    async def _wait_until_healthy(self, check: Healthcheck) -> None:
        """Return when the check succeeds; raises `EnvironmentFailed` after its failures in a row."""
        began, failures = anyio.current_time(), 0
        while True:
            result = await self.box.run(check.command, user=None, variables={}, seconds=check.timeout_sec)
            if result.exit_code == 0:
                return
            starting = anyio.current_time() - began < check.start_period_sec
            failures += not starting
            if failures >= check.retries:
                raise EnvironmentFailed(f"the healthcheck failed {failures} times: {result.output.strip()[-200:]}")
            await anyio.sleep(check.start_interval_sec if starting else check.interval_sec)

    async def state(self) -> dict[str, Any]:
        name = self._harbor.name if self._harbor else ""
        step = self._current.name if self._harbor else ""
        return {"task": name, "step": step, "rewards": self._rewards, "commands": self._commands, "failed": self._failed}

    async def verify(self) -> Verdict:
        """The reward of the steps that were played, once the last of them is graded."""
        assert self._harbor is not None
        if not self._over and not self._problem:
            await self._settle_step()
        if self._problem or not self._rewards:
            return Verdict(reward=None, reason=self._problem or "no step was graded")
        return Verdict(reward=self._harbor.combine(self._rewards))

    async def solve(self, seconds: float) -> Verdict:
        """Play the task's own solution, step by step, in place of a policy; raises `EnvironmentFailed` if there is none."""
        assert self._harbor is not None
        while True:
            step = self._current
            if step.solution is None:
                raise EnvironmentFailed(
                    f"{self._harbor.name} has no solution/solve.sh{f' in step {step.name}' if step.name else ''}"
                )
            await self.box.put(step.solution, SOLUTION)
            variables = self._harbor.config.solution.env
            command = f"chmod +x {SOLUTION}/solve.sh 2>/dev/null; exec {SOLUTION}/solve.sh"
            done = await self.box.run(command, user=step.agent.user, variables=variables, seconds=seconds)
            if done.exit_code:
                raise EnvironmentFailed(f"solve.sh failed with exit code {done.exit_code}: {done.output.strip()[-300:]}")
            await self.box.clear(SOLUTION)
            if (await self._finish_step("")).terminated:
                return await self.verify()

    async def do_nothing(self) -> Verdict:
        """End every step at once."""
        while not (await self._finish_step("")).terminated:
            pass
        return await self.verify()

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.stop()


def _format_observation(result: CommandResult) -> str:
    notes = {
        "time": "\n[the command did not end in time and was ended]",
        "memory": "\n[too much memory was used: all processes were ended; files stay]",
        "exit": "\n[all processes were ended; files stay]",
    }
    code = f"\n[exit code {result.exit_code}]" if result.exit_code else ""
    text = f"{result.output.rstrip()}{code}{notes.get(result.ended, '')}".strip("\n")
    return TOOL_RESULT + (text or "(no output)")
