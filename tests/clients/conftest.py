"""Relays and processes run on asyncio, as the gateways do."""

from __future__ import annotations

from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone
