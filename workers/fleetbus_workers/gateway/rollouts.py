"""One key for many conversations: each is an evaluation of its own, which is opened when its first call comes.

Who runs a whole evaluation with one client has one key for all of its rollouts. What the key stands for is written in it, so
that any gateway opens and finds the same episodes: a rollout's follows from the parent's id and the rollout's name. Rollouts
without names are told apart by what they continue (`conversation_roots`), in the memory of one gateway. Above: `rollout_calls`.
See docs/decisions/0207.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from fleetbus.bus.base import LogBus
from fleetbus_schemas import EpisodeRequested, Subjects, Task, decode
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall, InvalidCall
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession, TooManyCalls
from fleetbus_workers.gateway.agent_keys import SessionKeys
from fleetbus_workers.gateway.agent_sessions import AgentSessions
from fleetbus_workers.gateway.conversation_roots import digest_root, find_continued

PARENT_PREFIX = "fbp-"
LISTING_PREFIX = "fbl-"
"""Of the key that lists a parent's rollouts, their reward keys included."""

PARENT_SECONDS = 24 * 3600.0
"""How long a parent's key opens and finds rollouts."""

MAX_ROLLOUTS = 4096
"""Rollouts that one key may open."""

MAX_NAME = 256
TASK_BYTES = 2048
"""Most of a task that is written into a key, which travels in a header; larger ones are named by their key in the run."""

MAX_PARENTS = 256
"""Parents whose rollouts are known here at a time; an older one's are found in the log again, by their names."""

MAX_REQUESTS = 256
"""Calls of one parent whose rollout is not known yet, at a time; a further one is answered 429."""

OpenRequest = Callable[[str, "Parent"], Awaitable[EpisodeRequested]]


class Parent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The meaning of a parent's key. ``rollouts`` is the most that one gateway opens, with those that it finds in the log;
    ``task`` is JSON, empty for the run's task of ``task_key``."""

    id: str
    rollouts: int
    task: str = ""
    task_key: str = ""
    version: int | None = None
    temperature: float | None = None


class _Opened(msgspec.Struct):
    """The rollouts of one parent that are known here: their names, and the sessions of those whose names were chosen here, by
    the root of their conversations."""

    names: set[str] = set()
    roots: dict[str, dict[str, AgentSession]] = {}
    requests: int = 0

    def list_all(self) -> dict[str, AgentSession]:
        """Every session whose name was chosen here: a response that a call names may be of any."""
        return {name: session for sessions in self.roots.values() for name, session in sessions.items()}

    def check_room(self, parent: Parent) -> None:
        """Raises `InvalidCall` where the key has opened all that it may."""
        if len(self.names) >= parent.rollouts:
            raise InvalidCall(f"this key has opened its {parent.rollouts} rollouts: ask for a key with more")


async def read_request(bus: LogBus, subjects: Subjects, pools: Sequence[str], episode: str) -> EpisodeRequested | None:
    """The request of an episode, in whichever pool; None if the log has none."""
    for pool in pools:
        if (stored := await bus.last(subjects.task(pool, episode))) is not None:
            return decode(EpisodeRequested, stored.payload, subject=stored.subject)
    return None


class Rollouts:
    """Opens and finds the rollouts of parents. ``open_request`` stores the request of an episode, unless one is stored."""

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        pools: Sequence[str],
        keys: SessionKeys,
        sessions: AgentSessions,
        open_request: OpenRequest,
    ) -> None:
        self._bus, self._subjects, self._pools = bus, subjects, pools
        self._keys, self._sessions, self._open_request = keys, sessions, open_request
        self._opened: OrderedDict[str, _Opened] = OrderedDict()

    def make_keys(self, parent: Parent) -> tuple[str, str, int]:
        """The key of a parent, the one that lists its rollouts, and when both expire in nanoseconds since the epoch."""
        said = base64.urlsafe_b64encode(msgspec.json.encode(parent)).decode().rstrip("=")
        expires_ns = self._bus.now_ns() + int(PARENT_SECONDS * 1e9)
        listing = self._keys.make(parent.id, expires_ns, LISTING_PREFIX)
        return self._keys.make(said, expires_ns, PARENT_PREFIX), listing, expires_ns

    def read_parent(self, keys: Sequence[str]) -> Parent | None:
        """The parent that one of these keys is of, None if none is. Raises `KeyRefused` for one that expired or is forged."""
        key = next((key for key in keys if key.startswith(PARENT_PREFIX)), None)
        if key is None:
            return None
        said = self._keys.read(key, self._bus.now_ns(), PARENT_PREFIX)
        return msgspec.json.decode(base64.urlsafe_b64decode(said + "=" * (-len(said) % 4)), type=Parent)

    @contextmanager
    def one_request(self, parent: Parent) -> Iterator[None]:
        """A call whose rollout is looked for. Raises `TooManyCalls`."""
        opened = self._find_opened(parent.id)
        if opened.requests >= MAX_REQUESTS:
            raise TooManyCalls(f"{MAX_REQUESTS} calls of this key wait for their rollouts already")
        opened.requests += 1
        try:
            yield
        finally:
            opened.requests -= 1

    async def find_named(self, parent: Parent, name: str) -> AgentSession:
        """The session of a rollout, opened now if it is new. Raises `InvalidCall` for one too many."""
        if len(name) > MAX_NAME:
            raise InvalidCall(f"the name of a rollout may have {MAX_NAME} characters")
        opened, episode = self._find_opened(parent.id), name_episode(parent.id, name)
        if name not in opened.names:
            opened.check_room(parent)
            opened.names.add(name)
            try:
                await self._open_request(episode, parent)
            except BaseException:
                opened.names.discard(name)
                raise
        return await self._sessions.find_episode(episode)

    async def choose_name(self, parent: Parent, call: AgentCall, digest: str, *, repetition: bool) -> str:
        """The name of the rollout whose conversation a call without a name continues or repeats, or of a new one. Raises
        `InvalidCall` where a gateway before this one opened several that begin alike."""
        opened, root = self._find_opened(parent.id), digest_root(call.messages)
        if root not in opened.roots:
            is_new = not repetition and not any(message.role == "assistant" for message in call.messages)
            if recalled := {} if is_new else await self._recall(parent, root):
                opened.roots.setdefault(root, recalled)
        known = opened.roots.get(root, {}) if not call.previous else opened.list_all()
        for name in [name for name, session in known.items() if session.moved]:
            known[name] = await self.find_named(parent, name)
            self.remember(parent, name, known[name])
        found = find_continued(list(known.values()), call, digest, repetition=repetition)
        if found is not None:
            return next(name for name, session in known.items() if session is found)
        opened.check_room(parent)  # before anything is remembered of a root: a caller can think of any number of them
        number = 0
        while await self._is_taken(opened, parent, name := f"{root}-{number}"):
            number += 1
        return name

    async def _is_taken(self, opened: _Opened, parent: Parent, name: str) -> bool:
        """A name is looked up here again after the log was asked: another call may have taken it meanwhile."""
        if name in opened.names:
            return True
        if await self.find_request(name_episode(parent.id, name)) is not None:
            opened.names.add(name)  # another gateway's: it counts here, too, and is not looked up again
        return name in opened.names

    def remember(self, parent: Parent, name: str, session: AgentSession) -> None:
        """Remember the session of a rollout whose name was chosen here, for the calls that continue it."""
        root = name.rpartition("-")[0]
        self._find_opened(parent.id).roots.setdefault(root, {})[name] = session

    async def _recall(self, parent: Parent, root: str) -> dict[str, AgentSession]:
        """The rollout of a root that another gateway opened, if any."""
        first, second = [await self.find_request(name_episode(parent.id, f"{root}-{number}")) for number in range(2)]
        if second is not None:
            raise InvalidCall("several rollouts of this key begin alike and their gateway is gone: name them (X-Session-ID)")
        return {} if first is None else {f"{root}-0": await self.find_named(parent, f"{root}-0")}

    async def find_request(self, episode: str) -> EpisodeRequested | None:
        """The request of an episode, if the log has it."""
        return await read_request(self._bus, self._subjects, self._pools, episode)

    async def list_rollouts(self, parent_id: str, name: str = "") -> list[tuple[str, EpisodeRequested]]:
        """The rollouts that are known here by their names, or the one of this ``name``, wherever it was opened."""
        names = [name] if name else sorted(self._find_opened(parent_id).names)
        found = [(each, await self.find_request(name_episode(parent_id, each))) for each in names]
        return [(each, request) for each, request in found if request is not None]

    def _find_opened(self, parent_id: str) -> _Opened:
        opened = self._opened.setdefault(parent_id, _Opened())
        self._opened.move_to_end(parent_id)
        while len(self._opened) > MAX_PARENTS:
            self._opened.popitem(last=False)
        return opened


def name_episode(parent_id: str, name: str) -> str:
    """The episode of a rollout: who knows the parent and the name knows it."""
    return f"{parent_id}-{hashlib.blake2b(name.encode('utf-8', 'surrogatepass'), digest_size=10).hexdigest()}"


def write_task(task: Task) -> str:
    """A task as it stands in a key. Raises `ValueError` for a large one, and for variables: agents can read a key."""
    said = msgspec.json.encode(task).decode()
    if len(said) > TASK_BYTES or task.env_variables:
        raise ValueError(
            f"the task of rollouts may have {TASK_BYTES} bytes and no env_variables, which agents could read: name one of the "
            "run by its task_key"
        )
    return said


def read_task(parent: Parent, tasks: Mapping[str, Task]) -> Task:
    """The task of a parent's rollouts. Raises `InvalidCall` where the run's ``tasks`` have it no more."""
    if not parent.task_key:
        return msgspec.json.decode(parent.task, type=Task)
    if parent.task_key not in tasks:
        raise InvalidCall(f"the run has no task with the key {parent.task_key!r}")
    return tasks[parent.task_key]
