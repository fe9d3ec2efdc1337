"""The subjects of one run, each spelled by the table of channels (`fleetbus_schemas.channels`).

``fb.<run>.>`` is captured by the run's stream: the log. Request/reply never uses a captured subject (the stream's own ack
would be taken for the answer), so calls, control, heartbeats and lane leases have prefixes of their own.
"""

from __future__ import annotations

from fleetbus_schemas.channels import BY_NAME, CHANNELS
from fleetbus_schemas.names import is_name

ANY_LANE = "any"
"""The lane that every inference worker of a policy pulls from."""


class InvalidName(ValueError):
    """A name that cannot be one token of a subject: only letters, digits, ``-`` and ``_`` are, 128 at most."""


def check_name(kind: str, name: str) -> str:
    """``name`` unchanged if it can be a token of a subject; raises `InvalidName`."""
    if not is_name(name):
        raise InvalidName(f"{kind} {name!r} must be 1 to 128 letters, digits, '-' or '_'")
    return name


ALL_HEARTBEATS = BY_NAME["heartbeats"].below(run="*")
"""The heartbeats of all runs: for views of a whole server instead of one run."""


class Subjects:
    """The subjects of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_name("run", run)
        self._templates = {channel.name: channel.address.replace("{run}", run) for channel in CHANNELS}

    @property
    def log(self) -> str:
        return self._templates["log"]

    @property
    def lanes(self) -> str:
        return BY_NAME["lanes"].below(run=self.run)

    def task(self, pool: str, episode: str) -> str:
        return self._templates["requests"].format(pool=pool, episode=episode)

    def tasks(self, pool: str = "*") -> str:
        return BY_NAME["requests"].below(run=self.run, pool=pool)

    def observation(self, policy: str, lane: str, episode: str) -> str:
        return self._templates["observations"].format(policy=policy, lane=lane, episode=episode)

    def observations(self, policy: str = "*", lane: str = "*") -> str:
        return BY_NAME["observations"].below(run=self.run, policy=policy, lane=lane)

    def action(self, lane: str, episode: str) -> str:
        return self._templates["actions"].format(lane=lane, episode=episode)

    def actions(self, lane: str = "*") -> str:
        return BY_NAME["actions"].below(run=self.run, lane=lane)

    def episode(self, episode: str) -> str:
        return self._templates["episodes"].format(episode=episode)

    @property
    def episodes(self) -> str:
        return BY_NAME["episodes"].below(run=self.run)

    def label(self, episode: str) -> str:
        return self._templates["labels"].format(episode=episode)

    @property
    def labels(self) -> str:
        return BY_NAME["labels"].below(run=self.run)

    def operation(self, role: str, key: str) -> str:
        """The subject of one key's operations; the key is the public one."""
        return self._templates["operations"].format(role=role, key=key)

    @property
    def operations(self) -> str:
        return BY_NAME["operations"].below(run=self.run)

    def session(self, session: str) -> str:
        return self._templates["sessions"].format(session=session)

    def policy(self, name: str) -> str:
        return self._templates["policies"].format(policy=name)

    def transfer(self, policy: str) -> str:
        """The subject on which versions are offered while their files are written."""
        return self._templates["transfers"].format(policy=policy)

    def train(self, name: str) -> str:
        return self._templates["training"].format(policy=name)

    @property
    def floor(self) -> str:
        return self._templates["floor"]

    def life(self, role: str, worker: str) -> str:
        return self._templates["life"].format(role=role, worker=worker)

    def rpc(self, worker: str, session: str) -> str:
        return self._templates["sessionCalls"].format(worker=worker, session=session)

    def control(self, role: str, worker: str, command: str) -> str:
        """The subject of a command to a worker, or to `all` of a role; ``*``: of every command."""
        return self._templates["control"].format(role=role, worker=worker, command=command)

    def heartbeat(self, role: str, worker: str) -> str:
        return self._templates["heartbeats"].format(role=role, worker=worker)

    @property
    def heartbeats(self) -> str:
        return BY_NAME["heartbeats"].below(run=self.run)

    def lane(self, role: str, lane: str) -> str:
        return self._templates["lanes"].format(role=role, lane=lane)

    def consumer_name(self, role: str, consumer: str) -> str:
        return self._templates["consumer_names"].format(role=role, consumer=consumer)
