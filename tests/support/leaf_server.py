"""A leaf node of a server with keys, with the folder that `fleetbus auth site` writes."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.site_folder import write_site
from fleetbus.bus.nats.server import find_server
from fleetbus.bus.streams import RunPlan
from tests.support.ports import free_ports

CONNECTED = "Leafnode connection created"


@asynccontextmanager
async def leaf_server(
    keys: AuthFolder, plan: RunPlan, role: str, folder: Path, port: int, *, until: str = CONNECTED
) -> AsyncIterator[str]:
    """Its address, once it is connected to the server that listens for it on ``port``, or has logged other words. Its folder
    is ``folder``."""
    site, (own,) = AuthFolder(folder), free_ports(1)
    write_site(keys, site, [plan], [role], hubs=[f"127.0.0.1:{port}"], hosts=["127.0.0.1"], days=1)
    log = folder / "server.log"
    command = [str(find_server()), "-c", str(site.server_config), "-p", str(own), "-l", str(log)]
    process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with anyio.fail_after(30):
            while not log.exists() or until not in log.read_text():
                assert process.returncode is None, log.read_text() if log.exists() else "it did not start"
                await anyio.sleep(0.02)
        yield f"nats://127.0.0.1:{own}"
    finally:
        with anyio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            await process.aclose()
