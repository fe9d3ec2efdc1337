"""Real servers run on asyncio, as workers do; tests under virtual time say so themselves."""

from __future__ import annotations

from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone
