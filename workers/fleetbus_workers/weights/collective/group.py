"""A group of one learner and the engines that came in time, made for one version and left behind with it.

Rank 0 is the learner. Whoever is killed, stopped or slow ends the group for all: every wait has an end, nothing is repeated,
and nobody has to be told. Nothing here knows what is sent; nothing that arrives is unpickled. Groups are gloo's. This file
alone calls torch.distributed for transfers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from fleetbus_workers.weights.transfer import TransferFailed

STALL_SECONDS = 10.0
"""Of each step of a transfer: a peer that does not move for so long ends it."""

JOIN_SECONDS = 5.0
"""The learner waits so long for engines that it has heard of."""

POLL_SECONDS = 0.005
_dist: Any = torch.distributed  # its types leave out stores and the classes of groups
_JOINED, _WORLD, _GROUP = "joined", "world", "group"


class Group:
    """Members that all call `broadcast` with the same sizes in the same order. Belongs to one thread."""

    def __init__(self, store: Any, rank: int, size: int, address: str) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=STALL_SECONDS)
        options._threads = 1
        self._store = store  # gloo's members find each other there
        self._group = _dist.ProcessGroupGloo(_dist.PrefixStore(_GROUP, store), rank, size, options)

    def broadcast(self, content: torch.Tensor) -> Callable[[], None]:
        """Begin to send a tensor of the leader's, or to receive it, and return what waits for the end and raises
        `TransferFailed`."""
        try:
            work = self._group.broadcast(content, 0)
        except RuntimeError as error:
            raise TransferFailed(_shorten(error)) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise TransferFailed(_shorten(error)) from error

        return wait

    def close(self) -> None:
        """Leave: who waits for this member is told at once."""
        self._group.abort()
        del self._group


class Rendezvous:
    """The learner's place where engines meet it, listening on ``address`` alone. Raises `OSError`."""

    def __init__(self, address: str, token: str) -> None:
        with socket.create_server((address, 0), family=_find_family(address)) as listening:
            self.port: int = listening.getsockname()[1]
            # The store listens on all addresses unless it is given a socket, which is its own from then on.
            server = _dist.TCPStore(
                address,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=STALL_SECONDS),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._address = address
        self._store = _dist.PrefixStore(token, server)

    def gather(self, expected: int, is_over: Callable[[], bool]) -> Group | None:
        """The group with who has come, once ``expected`` engines have or `JOIN_SECONDS` are over; None if nobody has. Blocks.
        Raises `TransferFailed`."""
        ends = time.monotonic() + JOIN_SECONDS
        try:
            while (joined := self._store.add(_JOINED, 0)) < expected and time.monotonic() < ends:
                if is_over():
                    self._store.set(_WORLD, "0")  # who has come need not wait
                    raise TransferFailed("the version is given up")
                time.sleep(POLL_SECONDS)
            self._store.set(_WORLD, str(joined + 1))
            return Group(self._store, 0, joined + 1, self._address) if joined else None
        except RuntimeError as error:
            raise TransferFailed(_shorten(error)) from error


def join(address: str, port: int, token: str) -> Group:
    """The group of an offer, as one of its engines. Blocks for `JOIN_SECONDS` and twice `STALL_SECONDS` at most. Raises
    `TransferFailed`."""
    wait = timedelta(seconds=STALL_SECONDS)
    try:
        with socket.create_connection((address, port), STALL_SECONDS) as connection:
            own = connection.getsockname()[0]  # the address of this machine that the learner can reach
        store = _dist.PrefixStore(token, _dist.TCPStore(address, port, is_master=False, timeout=wait))
        rank = store.add(_JOINED, 1)
        store.wait([_WORLD], timedelta(seconds=JOIN_SECONDS + STALL_SECONDS))
        size = int(store.get(_WORLD))
        if rank >= size:
            raise TransferFailed("the group was made without this engine")
        return Group(store, rank, size, own)
    except (OSError, RuntimeError, ValueError) as error:
        raise TransferFailed(_shorten(error)) from error


def _find_family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
