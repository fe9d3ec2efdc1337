"""Every subject that fleetbus uses, spelled here and nowhere else.

``fb.<run>.>`` is captured by the run's stream: the log. Request/reply never uses a captured subject (the stream's own ack
would be taken for the answer), so calls, control, heartbeats and lane leases have prefixes of their own.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")

ANY_LANE = "any"
"""The lane that every inference worker of a policy pulls from."""


class InvalidName(ValueError):
    """A name that cannot be one token of a subject: only letters, digits, ``-`` and ``_`` are, 128 at most."""


def is_name(name: str) -> bool:
    """True if it can be one token of a subject."""
    return _TOKEN.match(name) is not None


def check_name(kind: str, name: str) -> str:
    """``name`` unchanged if it can be a token of a subject; raises `InvalidName`."""
    if not is_name(name):
        raise InvalidName(f"{kind} {name!r} must be 1 to 128 letters, digits, '-' or '_'")
    return name


ALL_HEARTBEATS = "fbhb.*.>"
"""The heartbeats of all runs: for views of a whole server instead of one run."""


class Subjects:
    """The subjects of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name("run", run)
        self._log = f"fb.{run}."

    @property
    def log(self) -> str:
        return self._log + ">"

    @property
    def lanes(self) -> str:
        return f"fblane.{self.run}.>"

    def task(self, pool: str, episode: str) -> str:
        return f"{self._log}task.{pool}.{episode}"

    def tasks(self, pool: str = "*") -> str:
        return f"{self._log}task.{pool}.>"

    def observation(self, policy: str, lane: str, episode: str) -> str:
        return f"{self._log}obs.{policy}.{lane}.{episode}"

    def observations(self, policy: str = "*", lane: str = "*") -> str:
        return f"{self._log}obs.{policy}.{lane}.>"

    def action(self, lane: str, episode: str) -> str:
        return f"{self._log}act.{lane}.{episode}"

    def actions(self, lane: str = "*") -> str:
        return f"{self._log}act.{lane}.>"

    def episode(self, episode: str) -> str:
        return f"{self._log}episode.{episode}"

    @property
    def episodes(self) -> str:
        return f"{self._log}episode.>"

    def session(self, session: str) -> str:
        return f"{self._log}session.{session}"

    def policy(self, name: str) -> str:
        return f"{self._log}policy.{name}"

    def train(self, name: str) -> str:
        return f"{self._log}train.{name}"

    @property
    def floor(self) -> str:
        return f"{self._log}floor"

    def life(self, role: str, worker: str) -> str:
        return f"{self._log}life.{role}.{worker}"

    def rpc(self, worker: str, session: str) -> str:
        return f"fbrpc.{self.run}.{worker}.{session}"

    def control(self, role: str, worker: str) -> str:
        return f"fbctl.{self.run}.{role}.{worker}"

    def heartbeat(self, role: str, worker: str) -> str:
        return f"fbhb.{self.run}.{role}.{worker}"

    @property
    def heartbeats(self) -> str:
        return f"fbhb.{self.run}.>"

    def lane(self, role: str, lane: str) -> str:
        return f"fblane.{self.run}.{role}.{lane}"
