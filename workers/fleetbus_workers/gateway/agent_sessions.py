"""Sessions of agents that run elsewhere, in one gateway: who waits for an episode, which are wanted here, which are played.

A request is pulled only for somebody: an agent that asks for one, or a call whose episode is not played here, because its
gateway died. What comes instead of it is returned. Nothing here outlives the process but what the log has.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Delivery, LogBus
from fleetbus.concurrency.notifier import Notifier
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import read_episode_state
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, MalformedMessage, Subjects, decode
from fleetbus_workers.environment.adapters.agent.sessions import MOVED, AgentSession, KeyRefused, SessionMoved, TooManyCalls
from fleetbus_workers.gateway.agent_keys import PREFIX, SessionKeys

OWN_PREFIX = "session-"
"""Episodes that were asked for at a gateway: they are their opener's, and given to nobody else."""

HANDOVER_SECONDS = 30.0
"""How long a call waits for its episode to come here: a dead gateway's lease, and some."""

RESULT_SECONDS = 10.0
"""How long the result of a session that has closed is waited for; without one, its episode is another gateway's."""

LOOK_SECONDS = 0.5
HELD_SECONDS = 0.25
RETURN_SECONDS = 1.0
"""A request that nobody here wants is returned after so long, and given out again after that."""

SEARCH_HELD_SECONDS = 0.01
SEARCH_RETURN_SECONDS = 5.0
"""The same for a learner's request while a call waits for its episode. What returns comes before what was not looked at
yet: some hundred requests are looked through in between, on the way to the one that is wanted."""

MAX_WAITING = 1024
"""Agents that ask for an episode, and calls whose episode is not here, at a time."""

log = structlog.get_logger(__name__)


class Offer(msgspec.Struct, frozen=True):
    """An episode for an agent."""

    key: str
    request: EpisodeRequested


class _Waiter:
    """An agent that asks for an episode; ``asked`` names its request, so that a repetition is known."""

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.given = anyio.Event()
        self.offer: Offer | None = None


class AgentSessions:
    """Directory of the endpoint, intake of the worker, registry of the environments."""

    def __init__(self, bus: LogBus, subjects: Subjects, keys: SessionKeys) -> None:
        self._bus = bus
        self._subjects = subjects
        self._keys = keys
        self._sessions: dict[str, AgentSession] = {}
        self._waiters: deque[_Waiter] = deque()
        self._unclaimed: deque[Offer] = deque()
        self._given: dict[str, Offer] = {}
        """By the name of its request what an agent was given, as long as that is played here."""
        self._reserved: set[str] = set()
        self._wanted: Counter[str] = Counter()
        self._changed = Notifier()
        self.on_wanted: Callable[[], None] = lambda: None

    # Intake

    def count_wanted(self) -> int:
        """One per agent that waits, and one for all calls whose episodes are not here."""
        return max(len(self._waiters) - len(self._reserved), 0) + bool(self._wanted)

    async def handle(self, delivery: Delivery, play: Callable[[Delivery], Awaitable[None]]) -> None:
        """Play a request that somebody here wants, return any other."""
        try:
            request = decode(EpisodeRequested, delivery.message.payload, subject=delivery.message.subject)
        except MalformedMessage:
            await play(delivery)  # which says so
            return
        episode = request.episode_id
        is_known = episode in self._sessions or episode in self._wanted or request.deadline_ns <= self._bus.now_ns()
        if not is_known and (episode.startswith(OWN_PREFIX) or len(self._waiters) <= len(self._reserved)):
            searches = bool(self._wanted)
            await anyio.sleep(SEARCH_HELD_SECONDS if searches else HELD_SECONDS)
            is_learners = searches and not episode.startswith(OWN_PREFIX)
            await delivery.nak(SEARCH_RETURN_SECONDS if is_learners else RETURN_SECONDS)
            return
        if not is_known:
            self._reserved.add(episode)
        try:
            await play(delivery)
        finally:
            self._reserved.discard(episode)
            self._changed.notify()

    def count_open(self) -> int:
        """Sessions that are played here."""
        return len(self._sessions)

    # Registry

    def open_session(self, request: EpisodeRequested) -> AgentSession:
        """See `SessionRegistry`."""
        key = self._keys.make(request.episode_id, request.deadline_ns)
        return AgentSession(takes_reward=not request.task.verifier, key=key)

    def admit_calls(self, session: AgentSession, request: EpisodeRequested, *, is_new: bool) -> None:
        """See `SessionRegistry`. Only what nobody was given before is given to an agent: who has the key may still live."""
        episode = request.episode_id
        self._sessions[episode] = session
        self._reserved.discard(episode)
        self._changed.notify()
        if is_new and not episode.startswith(OWN_PREFIX):
            self._unclaimed.append(Offer(session.key, request))
            self._match()
        self.on_wanted()

    def remove(self, session: AgentSession, request: EpisodeRequested) -> None:
        """See `SessionRegistry`."""
        if self._sessions.get(request.episode_id) is session:
            del self._sessions[request.episode_id]
        self._unclaimed = deque(offer for offer in self._unclaimed if offer.key != session.key)
        self._given = {asked: offer for asked, offer in self._given.items() if offer.key != session.key}
        self._changed.notify()

    def _match(self) -> None:
        while self._unclaimed and self._waiters:
            waiter = self._waiters.popleft()
            waiter.offer = self._unclaimed.popleft()
            if waiter.asked:
                self._given[waiter.asked] = waiter.offer
            waiter.given.set()

    # Agents

    async def next_offer(self, seconds: float, asked: str = "") -> Offer | None:
        """The next episode of the learner's, or None after so long. A repetition of the request that ``asked`` names gets the
        same one while it is played here, for the first answer may have been lost. Raises `TooManyCalls`."""
        if asked in self._given:
            return self._given[asked]
        for earlier in [waiter for waiter in self._waiters if asked and waiter.asked == asked]:
            self._waiters.remove(earlier)
            earlier.given.set()
        if len(self._waiters) >= MAX_WAITING:
            raise TooManyCalls(f"{MAX_WAITING} agents wait for an episode already")
        waiter = _Waiter(asked)
        self._waiters.append(waiter)
        self._match()
        self.on_wanted()
        try:
            with anyio.move_on_after(seconds):
                await waiter.given.wait()
        except BaseException:  # the agent went away in the very moment
            if waiter.offer is not None and not waiter.asked:  # of a named request, the repetition gets it
                self._unclaimed.appendleft(waiter.offer)
                self._match()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return waiter.offer

    def make_key(self, request: EpisodeRequested, prefix: str = PREFIX) -> str:
        """The key of an episode that was asked for here, or the one for its reward."""
        return self._keys.make(request.episode_id, request.deadline_ns, prefix)

    def read_episode(self, keys: Sequence[str], prefix: str = PREFIX) -> str:
        """The episode that one of these keys is of; while it is played here, its worker's clock says how long. Raises
        `KeyRefused` for what is wrong with the last."""
        refused = KeyRefused("the request has no key")
        for key in keys:
            try:
                episode = self._keys.read(key, 0, prefix)
                return episode if episode in self._sessions else self._keys.read(key, self._bus.now_ns(), prefix)
            except KeyRefused as error:
                refused = error
        raise refused

    async def find(self, keys: Sequence[str]) -> AgentSession:
        """See `SessionDirectory`; a session that is over answers every call with a request to stop."""
        return await self.find_episode(self.read_episode(keys))

    async def find_episode(self, episode: str) -> AgentSession:
        """The session of an episode, waited for if it is not here yet. Raises `SessionMoved`, `TooManyCalls`."""
        if (session := self._sessions.get(episode)) is not None:
            return session
        if len(self._wanted) >= MAX_WAITING:
            raise TooManyCalls(f"calls of {MAX_WAITING} other sessions wait already")
        self._wanted[episode] += 1
        try:
            with anyio.move_on_after(HANDOVER_SECONDS):
                while True:
                    if (session := self._sessions.get(episode)) is not None:
                        return session
                    if await self._has_ended(episode):
                        return build_ended_session()
                    self.on_wanted()
                    with anyio.move_on_after(LOOK_SECONDS):
                        await self._changed.wait()
        finally:
            self._wanted[episode] -= 1
            if not self._wanted[episode]:
                del self._wanted[episode]
        raise SessionMoved(MOVED)

    async def _has_ended(self, episode: str) -> bool:
        return await self.read_result(episode) is not None

    async def read_result(self, episode: str) -> EpisodeFinished | None:
        """Read the end of an episode, if it has ended. Raises `SessionMoved` where the log does not say."""
        try:
            return (await read_episode_state(self._bus, self._subjects, episode)).result
        except RequestUnanswered as unanswered:
            raise SessionMoved(f"the log does not answer: {unanswered}") from unanswered

    async def wait_for_result(self, episode: str, session: AgentSession) -> EpisodeFinished | None:
        """Wait for the result of the episode whose session has just concluded; None if another worker has to say it."""
        await session.closed.wait()
        with anyio.move_on_after(RESULT_SECONDS):
            while (result := await self.read_result(episode)) is None:
                with anyio.move_on_after(LOOK_SECONDS):
                    await self._changed.wait()
            return result
        return None


def build_ended_session() -> AgentSession:
    """A session whose episode has ended: calls are answered, rewards refused."""
    session = AgentSession()
    session.end()
    session.close()
    return session
