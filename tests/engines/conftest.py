"""Engines run on asyncio, as inference workers do."""

from __future__ import annotations

from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone
