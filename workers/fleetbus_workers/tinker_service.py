"""A Tinker service as learner and inference workers both see it: a client, and the small file that a version is.

Shared by both, which must not import each other; the SDK is imported only when a client is made.
"""

import os

import msgspec

from fleetbus.config.settings import TinkerSettings
from fleetbus.errors import UserError

KEY = "TINKER_API_KEY"


class SamplerPath(msgspec.Struct, frozen=True, kw_only=True, tag="tinker"):
    """The content of a version's file: the path of sampler weights on the service."""

    sampler: str


def open_service_client(settings: TinkerSettings) -> object:
    """A client of the service; blocking. Raises `UserError` if there is no key or no answer."""
    import tinker

    if not os.environ.get(KEY):
        raise UserError(f"a Tinker service needs its key in the environment variable {KEY}")
    try:
        client = tinker.ServiceClient(**({"base_url": settings.url} if settings.url else {}))
        client.get_server_capabilities()
    except tinker.TinkerError as error:
        raise UserError(f"the Tinker service {settings.url or '(default)'} does not answer: {format_error(error)}") from error
    return client


def format_error(error: BaseException) -> str:
    """An error in one bounded line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
