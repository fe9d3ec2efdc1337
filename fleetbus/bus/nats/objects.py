"""An object store over JetStream, in the format of NATS's own clients (ADR-20), four times as fast to read as nats-py's.

An object is chunks on one subject and, last, one entry that names their subject, size and SHA-256. Chunks are stored several
at a time and read by batched direct gets, so no consumer is created and memory holds one batch. Above it are the weights;
below it the publisher and the direct gets.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from anyio.streams.memory import MemoryObjectSendStream

from fleetbus.bus.nats.api import STREAM_NOT_FOUND, ApiRefused
from fleetbus.bus.nats.connection import Connection
from fleetbus.bus.nats.declare import declare_bucket
from fleetbus.bus.nats.direct import ChunkReader, get_last
from fleetbus.bus.nats.publisher import Publisher
from fleetbus.bus.objects import ObjectMissing, ObjectTooLarge, check_object_name
from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.errors import BusClosed, BusError, LogFull, NotPermitted
from fleetbus_schemas.message import UNREADABLE

log = logging.getLogger(__name__)

CHUNK_BYTES = 128 * 1024
PUTS_AT_A_TIME = 8
PUT_TRIES = 3
PUT_LIMIT_SECONDS = 60.0
"""Of one chunk, a reconnect included."""

CLEAR_LIMIT_SECONDS = 5.0
"""For removing the chunks of an object that could not be stored."""

READ_AT_ONCE_BYTES = 4 << 20
"""Of the file that is stored; hashed and cut into chunks together."""


class _Meta(msgspec.Struct):
    """The entry that makes an object visible, with the field names of the format."""

    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    options: dict[str, int]


class NatsObjectStore:
    """See `fleetbus.bus.objects.ObjectStore`. The bucket is created with the first object."""

    def __init__(self, connection: Connection, publisher: Publisher, bucket: str) -> None:
        self._connection = connection
        self._publisher = publisher
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"

    async def put(self, name: str, file: Path) -> None:
        await self._put(name, partial(_read_blocks, file))

    async def put_bytes(self, name: str, content: bytes) -> None:
        await self._put(name, partial(_cut_blocks, content))

    async def _put(self, name: str, read: Callable[[], AsyncGenerator[bytes]]) -> None:
        check_object_name(name)
        await declare_bucket(self._connection.api, self._bucket)
        for _ in range(PUT_TRIES):
            nuid = secrets.token_hex(11)
            try:
                meta, in_order = await self._put_chunks(name, read, nuid)
                if in_order:
                    await self._publish(self._meta_subject(name), msgspec.json.encode(meta))
                    return
            except BaseException:
                with anyio.move_on_after(CLEAR_LIMIT_SECONDS, shield=True):
                    await self._clear_chunks(name, nuid)
                raise
            await self._clear_chunks(name, nuid)
        raise BusError(f"object {name}: its chunks were not stored in order, {PUT_TRIES} times; is the connection being cut?")

    async def get(self, name: str, file: Path) -> None:
        meta = await self._meta(name)
        incomplete = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            async with await anyio.open_file(incomplete, "wb") as content:
                await self._get_chunks(meta, content.write)
            os.replace(incomplete, file)
        finally:
            incomplete.unlink(missing_ok=True)

    async def get_bytes(self, name: str, *, max_bytes: int) -> bytes:
        meta = await self._meta(name)
        if meta.size > max_bytes:
            raise ObjectTooLarge(f"object {name} of bucket {self._bucket} has {meta.size} bytes, more than {max_bytes}")
        blocks: list[bytes] = []

        async def keep(block: bytes) -> None:
            blocks.append(block)

        await self._get_chunks(meta, keep)
        return b"".join(blocks)

    async def remove(self, name: str) -> None:
        check_object_name(name)
        try:
            meta = await self._meta(name)
        except ObjectMissing:
            return
        for subject in (self._meta_subject(name), self._chunk_subject(meta.nuid)):
            await self._connection.api.ask(f"STREAM.PURGE.{self._stream}", {"filter": subject})

    async def _clear_chunks(self, name: str, nuid: str) -> None:
        """Remove chunks, unless the object names them: repeated on a server that is nearly full, they would fill it for good.

        The last ones, and an entry that names them and was not answered, may still be on their way; an empty chunk behind them
        is answered when they are stored. Without that answer they stay.
        """
        subject = self._chunk_subject(nuid)
        try:
            with suppress(LogFull):
                await self._publisher.publish(
                    subject, b"", message_id=None, expected_last=None, timeout=CLEAR_LIMIT_SECONDS / 2
                )
            if not await self._has_chunks(name, nuid):
                await self._connection.api.ask(f"STREAM.PURGE.{self._stream}", {"filter": subject})
        except BusClosed:
            raise
        except (BusError, NotPermitted) as error:  # who stores images may remove nothing
            log.warning("nats: removal of an incomplete object failed; leaving its chunks in the bucket: %s", error)

    async def _has_chunks(self, name: str, nuid: str) -> bool:
        """True if the object of this name is made of these chunks."""
        try:
            return (await self._meta(name)).nuid == nuid
        except ObjectMissing:
            return False

    async def _put_chunks(self, name: str, read: Callable[[], AsyncGenerator[bytes]], nuid: str) -> tuple[_Meta, bool]:
        """Store the chunks of an object; False if a repeated one landed behind its successors, as after a cut connection."""
        digest, size = hashlib.sha256(), 0
        sequences: list[int] = []
        async with aclosing(read()) as blocks:
            async for block in blocks:
                await anyio.to_thread.run_sync(digest.update, block)
                size += len(block)
                sequences += await self._put_block(nuid, block)
        meta = _Meta(
            name=name,
            bucket=self._bucket,
            nuid=nuid,
            size=size,
            chunks=len(sequences),
            digest=f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}",
            options={"max_chunk_size": CHUNK_BYTES},
        )
        return meta, all(before < after for before, after in pairwise(sequences))

    async def _put_block(self, nuid: str, block: bytes) -> list[int]:
        """Store the chunks of a block, several at a time, and return their sequences."""
        view = memoryview(block)
        chunks = [bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(block), CHUNK_BYTES)]
        sequences = [0] * len(chunks)
        room = anyio.Semaphore(PUTS_AT_A_TIME)

        async def put(number: int) -> None:
            try:
                sequences[number] = await self._publish(self._chunk_subject(nuid), chunks[number])
            finally:
                room.release()

        async with open_first_error_task_group() as tasks:
            for number in range(len(chunks)):
                await room.acquire()
                tasks.start_soon(put, number)
        return sequences

    async def _get_chunks(self, meta: _Meta, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Write the chunks in order; while one batch is written, the next one is on its way. Never more than the size that the
        entry names, no matter what the bucket holds."""
        digest, size = hashlib.sha256(), 0
        send, receive = anyio.create_memory_object_stream[list[bytes]](1)
        async with open_first_error_task_group() as tasks, receive:
            tasks.start_soon(self._fetch, meta, send)
            async for chunks in receive:
                block = b"".join(chunks)
                size += len(block)
                if size > meta.size:
                    tasks.cancel_scope.cancel()
                    break
                await anyio.to_thread.run_sync(digest.update, block)
                await write(block)
        wanted = meta.digest.removeprefix("SHA-256=").rstrip("=")
        if size != meta.size or base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=") != wanted:
            raise ObjectMissing(f"object {meta.name} of bucket {self._bucket}: {size} of {meta.size} bytes, or another digest")

    async def _fetch(self, meta: _Meta, send: MemoryObjectSendStream[list[bytes]]) -> None:
        reader = ChunkReader(self._connection, self._stream, self._chunk_subject(meta.nuid))
        async with send:
            while (batch := await reader.next_batch()) is not None:
                await send.send(batch)

    async def _meta(self, name: str) -> _Meta:
        check_object_name(name)
        try:
            stored = await get_last(self._connection, self._stream, self._meta_subject(name))
        except ApiRefused as refused:
            if refused.code != STREAM_NOT_FOUND:
                raise
            stored = None
        if stored is None:
            raise ObjectMissing(f"object {name} is not in bucket {self._bucket}")
        try:
            return msgspec.json.decode(stored.payload, type=_Meta)
        except UNREADABLE as error:
            raise ObjectMissing(f"object {name} of bucket {self._bucket}: its entry cannot be read: {error}") from error

    async def _publish(self, subject: str, payload: bytes) -> int:
        stored = await self._publisher.publish(subject, payload, message_id=None, expected_last=None, timeout=PUT_LIMIT_SECONDS)
        return stored.sequence

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"


async def _read_blocks(file: Path) -> AsyncGenerator[bytes]:
    async with await anyio.open_file(file, "rb") as content:
        while block := await content.read(READ_AT_ONCE_BYTES):
            yield block


async def _cut_blocks(content: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(content), READ_AT_ONCE_BYTES):
        yield content[start : start + READ_AT_ONCE_BYTES]
