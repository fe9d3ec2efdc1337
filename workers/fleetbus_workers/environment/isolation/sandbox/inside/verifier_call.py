"""One call of a verifier's function: found in its code, given what it has parameters for. Standard library alone.

Inside the process that runs verifiers (`zygote`), so everything that is imported here is paid for by each of them.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # the module typing would double the memory that every fork has to copy tables for
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Protocol

    from fleetbus_workers.environment.isolation.sandbox.inside import database

    class CallSender(Protocol):
        """Sends the calls of verifier code to its environment."""

        def ask(self, call: str, *arguments: Any) -> Any: ...
else:
    import database

KEYWORDS, COROUTINE = 0x08, 0x80
"""Flags of a code object: it takes any keyword; it makes a coroutine."""


def call_verifier(code: CodeType, request: dict[str, object], connection: CallSender) -> float:
    """The number that the verifier function of ``code`` returns; raises what the code raises, `TypeError` if it is none."""
    scope: dict[str, Any] = {"__name__": "verifier", "__builtins__": builtins}
    exec(code, scope)
    function = find_function(scope)
    is_async = bool(function.__code__.co_flags & COROUTINE)
    available = {
        "env": AsyncEnvironment(connection) if is_async else Environment(connection),
        "final_answer": request["final_answer"],
        "conversation": request["conversation"],
    }
    result = function(**select_arguments(function, available))
    if is_async:
        asyncio = sys.modules.get("asyncio")
        result = drive(result) if asyncio is None else asyncio.run(result)
    return to_plain_number(result)


def find_function(scope: dict[str, Any]) -> Any:
    """``verify``, or the only function of the code; raises `NameError` if there is neither."""
    functions = [
        value for value in scope.values() if getattr(getattr(value, "__code__", None), "co_filename", "") == "<verifier>"
    ]
    if callable(scope.get("verify")):
        return scope["verify"]
    if len(functions) == 1:
        return functions[0]
    raise NameError(
        f"the verifier must define verify(); it defines {', '.join(f.__name__ for f in functions) or 'no function'}"
    )


def select_arguments(function: Any, available: dict[str, Any]) -> dict[str, object]:
    """Those of ``available`` that the function has parameters for; its first parameter is ``env`` under any name. Raises
    `TypeError` for another one that it cannot do without."""
    code = function.__code__
    if code.co_flags & KEYWORDS:
        return available
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: available[name] for name in names if name in available}
    if code.co_argcount and names[0] not in available:
        arguments[names[0]] = available["env"]
    first_optional = code.co_argcount - len(function.__defaults__ or ())
    optional = {*names[first_optional : code.co_argcount], *(function.__kwdefaults__ or ())}
    if unknown := [name for name in names if name not in arguments and name not in optional]:
        raise TypeError(f"verifier has the parameter {unknown[0]!r}; what it gets is named {', '.join(available)}")
    return arguments


def drive(coroutine: Any) -> Any:
    """Run a coroutine that waits for nothing but the environment, whose answers are read right where they are awaited."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError("the verifier waits for something; import asyncio at its top to run it in an event loop")


def to_plain_number(value: object) -> float:
    """The value as a number, or what it is instead."""
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"the verifier returned {type(value).__name__}, not a number")


class Environment:
    """The episode as verifier code sees it: calls that the worker makes."""

    def __init__(self, connection: CallSender) -> None:
        self._ask = connection.ask

    def call_tool(self, name: str, arguments: dict[str, object] | None = None) -> Any:
        return self._ask("call_tool", name, arguments or {})

    def query(self, sql: str, params: Any = ()) -> object:
        return self._ask("query", sql, list(params))

    def db(self, name: str = "current") -> database.Database:
        return database.Database(self._ask, name)


class AsyncEnvironment:
    """`Environment` for verifiers that await its calls."""

    def __init__(self, connection: CallSender) -> None:
        self._ask = connection.ask

    async def call_tool(self, name: str, arguments: dict[str, object] | None = None) -> Any:
        return self._ask("call_tool", name, arguments or {})

    async def query(self, sql: str, params: Any = ()) -> object:
        return self._ask("query", sql, list(params))

    def db(self, name: str = "current") -> database.AsyncDatabase:
        return database.AsyncDatabase(self._ask, name)
