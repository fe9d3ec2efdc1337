"""Sites of one run: each with a nats-server of its own, a leaf node without a store, behind a link that delays every byte.

Where the user may make network namespaces (root on Linux), a site is one: its processes reach nothing but their own server and
the link, and a cut takes the link down without a word. Elsewhere a site's processes run beside the others, and a cut ends the
link's connections.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc

from fleetbus.auth.folder import AuthFolder
from fleetbus.auth.site_folder import write_site
from fleetbus.bus.nats.server import find_server
from fleetbus.bus.streams import RunPlan
from tests.support.ports import free_ports
from tests.support.relay import Relay

CLIENT_PORT = 4222
"""Of the server of a site that is a namespace."""


def has_namespaces() -> bool:
    """True if this user may make network namespaces and links between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fb-try-{os.getpid()}"
    if not _ip("netns", "add", name):
        return False
    linked = _ip("link", "add", f"fbt{os.getpid()}", "type", "veth", "peer", "name", "fbt0", "netns", name)
    _ip("netns", "del", name)  # takes its end of the link along, and that the other
    return linked


def shuts_out() -> bool:
    """True if there is a firewall for namespaces."""
    return shutil.which("iptables") is not None and _run("iptables", "-S")


def _ip(*arguments: str) -> bool:
    return _run("ip", *arguments)


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Site:
    """``url`` is where its workers connect, with the keys in ``auth``; ``address`` is this side's end of its link."""

    def __init__(self, folder: Path, number: int, *, namespace: bool) -> None:
        self.name = f"site{number}"
        self.auth = AuthFolder(folder / self.name)
        self.log = folder / f"{self.name}.log"
        self.relays: list[Relay] = []
        self.is_namespace = namespace
        self._namespace = f"fb{os.getpid()}-{number}"
        self._link = f"fb{os.getpid() % 10**6}v{number}"
        third = os.getpid() % 250
        self.address = f"10.{70 + number}.{third}.1" if namespace else "127.0.0.1"
        self._inside = f"10.{70 + number}.{third}.2"
        self._port = CLIENT_PORT if namespace else free_ports(1)[0]

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def command(self, *words: str) -> list[str]:
        """A command line that runs at the site."""
        return ["ip", "netns", "exec", self._namespace, *words] if self.is_namespace else list(words)

    async def cut(self) -> None:
        """Nothing gets in or out, and nobody is told where the site is a namespace."""
        if self.is_namespace:
            assert _ip("link", "set", self._link, "down")
        else:
            for relay in self.relays:
                await relay.cut()

    async def mend(self) -> None:
        if self.is_namespace:
            assert _ip("link", "set", self._link, "up")
        else:
            for relay in self.relays:
                await relay.mend()

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[None]:
        """The namespace and its link."""
        if not self.is_namespace:
            yield
            return
        try:
            assert _ip("netns", "add", self._namespace)
            assert _ip("link", "add", self._link, "type", "veth", "peer", "name", "hub", "netns", self._namespace)
            assert _ip("address", "add", f"{self.address}/30", "dev", self._link)
            assert _ip("link", "set", self._link, "up")
            for words in (
                ("address", "add", f"{self._inside}/30", "dev", "hub"),
                ("link", "set", "hub", "up"),
                ("link", "set", "lo", "up"),
            ):
                assert _ip("-n", self._namespace, *words)
            yield
        finally:
            _ip("netns", "del", self._namespace)

    def shut_in(self, port: int) -> None:
        """From now on its processes reach this port of this side, by TCP, and nothing else; of a namespace alone."""
        outward = ("-p", "tcp", "-d", self.address, "--dport", str(port))
        inward = ("-p", "tcp", "-s", self.address, "--sport", str(port), "!", "--syn")
        for rule in (("-A", "OUTPUT", *outward, "-j", "ACCEPT"), ("-A", "INPUT", *inward, "-j", "ACCEPT")):
            assert _run(*self.command("iptables", *rule))
        for chain in ("INPUT", "OUTPUT", "FORWARD"):
            assert _run(*self.command("iptables", "-P", chain, "DROP"))
            _run(*self.command("ip6tables", "-P", chain, "DROP"))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Its server, from `fleetbus auth site`."""
        command = self.command(
            str(find_server()), "-c", str(self.auth.server_config), "-p", str(self._port), "-l", str(self.log)
        )
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                process.kill()
                await process.wait()
                await process.aclose()


@asynccontextmanager
async def running_site(
    site: Site,
    keys: AuthFolder,
    plans: Sequence[RunPlan],
    leaf_ports: Sequence[int],
    *,
    roles: Sequence[str] = ("environment",),
    one_way_seconds: float = 0.0,
) -> AsyncIterator[Site]:
    """The server of a site that is already linked, and the link to each of the run's servers."""
    async with AsyncExitStack() as stack:
        for port in leaf_ports:
            relay = Relay(f"nats://127.0.0.1:{port}", one_way_seconds=one_way_seconds, host=site.address)
            site.relays.append(await stack.enter_async_context(relay.running()))
        hubs = [relay.url.removeprefix("nats://") for relay in site.relays]
        write_site(keys, site.auth, plans, roles, hubs=hubs, hosts=["127.0.0.1"], days=1)
        await stack.enter_async_context(site.serving())
        yield site
