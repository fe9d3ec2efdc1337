"""The bus over NATS JetStream: the only package that imports nats, and the only one that is bound to asyncio.

Above it are the command line and the workers, which see `fleetbus.bus.base.Bus`; below it is nats-py. Nothing here knows what a
message means.
"""

from fleetbus.bus.nats.bus import connect, inbox_prefix

__all__ = ["connect", "inbox_prefix"]
