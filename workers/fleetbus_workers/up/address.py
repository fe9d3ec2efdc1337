"""The address of a run's own server, or of its viewers' one, in a file of the run's folder while that server runs."""

from pathlib import Path

import msgspec

from fleetbus_schemas.message import UNREADABLE


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file. ``monitor`` is where ``/varz`` and its like are, empty without monitoring."""

    url: str
    pid: int = 0
    monitor: str = ""


def read_address(file: Path) -> Address | None:
    """None without a file, and for one that holds no address."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Address)
    except (FileNotFoundError, *UNREADABLE):
        return None
