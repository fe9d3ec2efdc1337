"""Python for verifiers: interpreters of the sandbox that nothing of the policy's has touched.

Above it are environments whose policy writes code, below it one sandbox per call. The words of an interpreter with code of the
policy may be made up by that code, so a verifier compares values in its own process.
"""

from collections.abc import Callable

from fleetbus_workers.environment.isolation.sandbox import CallResult, ExecutionResult, SandboxSession

FRESH, CALL = "python_fresh", "python_call"
EXITED_EARLY = 1


class FreshPython:
    """``make_session`` gives a sandbox of its own to each call; ``seconds`` bound each piece of code, None: the sandbox's."""

    def __init__(self, make_session: Callable[[], SandboxSession], seconds: float | None = None) -> None:
        self._make_session = make_session
        self._seconds = seconds

    async def call_tool(self, name: str, arguments: dict[str, object]) -> dict[str, object]:
        """``python_fresh`` runs ``code`` and gives ``stdout``, ``stderr``, ``exit_code`` and ``ended``.

        ``python_call`` also calls its ``function`` once for each of ``arguments`` (a list of lists) and gives ``results``, one
        for each, with ``value`` and ``error``. Raises `LookupError` for anything else.
        """
        code = read_code(name, arguments)
        if name == CALL:
            return await self._call_function(code, arguments.get("function"), arguments.get("arguments"))
        if name != FRESH:
            raise LookupError(f"there is no {name}: {FRESH} and {CALL} are there")
        session = self._make_session()
        try:
            return build_state(await session.run(code, seconds=self._seconds))
        finally:
            await session.close()

    async def _call_function(self, code: str, function: object, arguments: object) -> dict[str, object]:
        if not isinstance(function, str) or not isinstance(arguments, list) or not all(isinstance(a, list) for a in arguments):
            raise LookupError(f"{CALL} needs function, a name, and arguments, a list with a list for each call")
        session = self._make_session()
        try:
            loaded = await session.run(code, seconds=self._seconds)
            state = build_state(loaded)
            if loaded.ended or state["exit_code"]:
                last = loaded.stderr.strip().splitlines()[-1:] or [f"exit code {state['exit_code']}"]
                results = [CallResult(error=f"the code failed: {last[0]}", ended=loaded.ended)] * len(arguments)
            else:
                results = [await session.call(function, each, seconds=self._seconds) for each in arguments]
        finally:
            await session.close()
        ended = next((result.ended for result in results if result.ended), state["ended"])
        return state | {"ended": ended, "results": [{"value": each.value, "error": each.error} for each in results]}


def read_code(name: str, arguments: dict[str, object]) -> str:
    """The source that a tool is given. Raises `LookupError`."""
    code = arguments.get("code")
    if not isinstance(code, str):
        raise LookupError(f"{name} needs code")
    return code


def build_state(result: ExecutionResult) -> dict[str, object]:
    """A result as verifiers see it: code that exits before its last statement, where tests may stand, never has exit code 0."""
    ended = result.ended or result.code_ended
    exit_code = result.exit_code or (EXITED_EARLY if ended else 0)
    return {"stdout": result.stdout, "stderr": result.stderr, "exit_code": exit_code, "ended": ended}
