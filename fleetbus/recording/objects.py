"""Contents of the run's object bucket, which messages only refer to, in a recording beside those messages.

An object is a file of the recording whose name begins with `OBJECTS`. Token ids and texts are redacted; contents cannot be, for
their names are their hashes. So a recording without secrets leaves out every object that a secret can be read in, and says that
pictures have not been inspected.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.recording.format import OBJECTS
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.writer import RecordingWriter
from fleetbus_schemas import Action, MalformedMessage, Observation, PolicyPublished, decode

DEFAULT_LIMIT_BYTES = 256 << 20


class ObjectsAdded(msgspec.Struct, kw_only=True):
    """Counts of the objects that a recording's messages name. ``missing`` are in no bucket any more, ``withheld`` have a
    secret in them, ``beyond`` are those for which there was no room."""

    objects: int = 0
    bytes: int = 0
    missing: int = 0
    withheld: int = 0
    beyond: int = 0


class References:
    """Notes which objects entries name, in order of first mention."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def note(self, entries: Iterable[StreamEntry]) -> None:
        for entry in entries:
            self.names.update(dict.fromkeys(find_referenced_objects(entry)))


def find_referenced_objects(entry: StreamEntry) -> Iterator[str]:
    """The objects that an Observation, an Action or a version of the policy names; none for what is no message."""
    kind = entry.subject.split(".", 3)[2]
    try:
        if kind == "obs" and b"object" in entry.payload:
            observation = decode(Observation, entry.payload, subject=entry.subject)
            yield from (image.object for message in observation.messages for image in message.images)
        elif kind == "act" and b"images" in entry.payload:
            yield from (image.object for image in decode(Action, entry.payload, subject=entry.subject).images)
        elif kind == "policy" and b"manifest_object" in entry.payload:
            named = decode(PolicyPublished, entry.payload, subject=entry.subject).manifest_object
            yield from [named] if named else []
    except MalformedMessage:
        return


async def add_objects(
    writer: RecordingWriter,
    names: Iterable[str],
    fetch: Callable[[str], Awaitable[bytes | None]],
    *,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    redactor: Redactor | None,
) -> ObjectsAdded:
    """Write these objects, in order, up to ``limit_bytes`` altogether; ``fetch`` returns None for what is not there."""
    added = ObjectsAdded()
    for name in names:
        content = await fetch(name)
        if content is None:
            added.missing += 1
        elif redactor is not None and redactor.finds_secret(content):
            added.withheld += 1
        elif added.bytes + len(content) > limit_bytes:
            added.beyond += 1
        else:
            writer.add_content(OBJECTS + Path(name).name, content)
            added.objects += 1
            added.bytes += len(content)
    return added
