"""The endpoint that other packages call is served by uvicorn, which knows asyncio alone; so do all workers in production."""

from __future__ import annotations

from tests.support.backends import asyncio_alone

anyio_backend = asyncio_alone
