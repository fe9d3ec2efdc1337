"""The protocol of grading, between an environment and what runs a task's verifier code."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from fleetbus_schemas import ChatMessage, Image, Task, Text
from fleetbus_workers.environment.base import Verdict

Policy = Literal["auto", "required", "limits"]
"""What is graded where nothing isolates: `environment.sandbox`."""


class VerifierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one verification. ``seconds`` is wall-clock time, ``cpu_seconds`` are whole seconds."""

    seconds: float = 60.0
    cpu_seconds: int = 30
    memory_bytes: int = 1 << 30
    open_files: int = 64
    max_concurrent: int = 16


class VerifierTools(Protocol):
    """All that verifier code may ask of its episode's environment. What these raise is raised in the code."""

    async def call_tool(self, name: str, arguments: dict[str, object]) -> Any: ...

    async def query(self, sql: str, params: Sequence[Any]) -> object: ...


@runtime_checkable
class HasDatabases(Protocol):
    """Tools of an environment whose databases have names."""

    async def database(self, name: str, sql: str, params: Sequence[object]) -> dict[str, Any]:
        """``columns`` and ``rows`` of a query that only reads; raises `LookupError` with the database's own error."""


class Grader(Protocol):
    """Runs verifier code; `fleetbus_workers.environment.isolation.verifier.Verifier` is the real one."""

    async def verify(
        self, code: str, *, final_answer: str | None, conversation: Sequence[dict[str, Any]], tools: VerifierTools
    ) -> Verdict:
        """The verdict of ``code``, a Python source that defines ``verify`` or one function of another name.

        It is called with those of ``env``, ``final_answer`` and ``conversation`` that it has parameters for. Anything but a
        finite number from it is no verdict, and is not an exception here.
        """


async def grade(
    grader: Grader, task: Task | None, *, final_answer: str | None, conversation: Iterable[ChatMessage], tools: VerifierTools
) -> Verdict:
    """The verdict of the task's verifier on an episode; no reward if the task has no verifier."""
    if task is None or not task.verifier:
        return Verdict(reward=None, reason="the task has no verifier")
    return await grader.verify(
        task.verifier,
        final_answer=final_answer,
        conversation=[{"role": message.role, "content": to_plain_text(message.content)} for message in conversation],
        tools=tools,
    )


def to_plain_text(content: str | tuple[Text | Image, ...]) -> str:
    """The text of a message, with a placeholder for each image: verifier code gets no image data."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, Text) else "[image]" for part in content)
