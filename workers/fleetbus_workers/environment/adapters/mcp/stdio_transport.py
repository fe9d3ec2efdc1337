"""An MCP server as a child process that talks over its standard input and output, whose lines are bounded while they are read.

The SDK's own transport reads a line until it ends, however long it is, and joins it anew for every piece of it.
"""

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO, Any

import anyio
import mcp_types
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.serving.bounded_json import check_values

MAX_LINE_BYTES = 32 << 20
"""Of one message, as of a frame of a WebSocket: images are in it as base64."""

EXIT_SECONDS = 2.0
"""How long a server may take to end once its input is closed, and again after SIGTERM."""

_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)


@asynccontextmanager
async def open_stdio(command: Sequence[str], errors: IO[bytes], spawned: Callable[[], None]) -> AsyncIterator[Any]:
    """The streams of a session with the server that ``command`` starts; it is ended with all that it started. Raises `OSError`
    if it cannot be started, and `EnvironmentFailed` (in a group) for a line that is too long or holds too many values."""
    process = await anyio.open_process(list(command), env=get_default_environment(), stderr=errors, start_new_session=True)
    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        spawned()
        async with anyio.create_task_group() as tasks, incoming, received, sent, outgoing:
            tasks.start_soon(_read, process, incoming)
            tasks.start_soon(_write, process, outgoing, incoming)
            yield received, sent
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _read(process: Process, incoming: Any) -> None:
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    async with incoming:
        while True:
            try:
                line = await lines.receive_until(b"\n", MAX_LINE_BYTES)
            except anyio.DelimiterNotFound as error:
                raise EnvironmentFailed(f"the MCP server's line is longer than {MAX_LINE_BYTES} bytes") from error
            except (anyio.IncompleteRead, anyio.EndOfStream, *_GONE):
                return  # the session learns it from the closed stream
            try:
                check_values(line)
                message: SessionMessage | Exception = SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line))
            except ValueError as error:
                message = error
            try:
                await incoming.send(message)
            except _GONE:
                return


async def _write(process: Process, outgoing: Any, incoming: Any) -> None:
    assert process.stdin is not None
    try:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(text.encode() + b"\n")
    except _GONE:
        await incoming.aclose()  # so that no request waits for an answer


async def _end(process: Process) -> None:
    """Close its input, then end its process group: politely, then by force."""
    assert process.stdin is not None
    with suppress(*_GONE):
        await process.stdin.aclose()
    await _wait(process)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        await _wait(process)
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()


async def _wait(process: Process) -> None:
    """Until it has ended, for `EXIT_SECONDS` at most; not `Process.wait`, which waits for the end of inherited pipes, too."""
    with anyio.move_on_after(EXIT_SECONDS):
        while process.returncode is None:  # noqa: ASYNC110 (it gives no event)
            await anyio.sleep(0.01)
