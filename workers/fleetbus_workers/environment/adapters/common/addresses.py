"""Addresses in what a user writes after ``--environment``."""

from __future__ import annotations

from urllib.parse import urlsplit

from fleetbus.config.load import strip_credentials
from fleetbus.errors import UserError


def check_http_address(spec: str, url: str, *, example: str, secret: str) -> None:
    """Raises `UserError` that shows ``spec`` without its credentials, and an ``example``, if ``url`` is no HTTP address, or has
    a password: specs are shown and stored. ``secret`` is the environment variable that takes one instead."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or any(character.isspace() for character in url):
        shown, address = strip_credentials(spec), strip_credentials(url)
        raise UserError(f"environment {shown!r}: {address!r} is not an address such as {example}")
    if parts.username or parts.password:
        raise UserError(f"the address of {parts.hostname} must not hold a password: set {secret} instead")
