"""Asks for turns side by side: those that the environment told ahead are sent while the turn before them is waited for.

They stand in contexts of their own, so that no answer changes what the next one is shown; they are played, counted and recorded
in their order, one after another. What cannot be sent ahead is asked for in its turn
(docs/decisions/0268-turns-side-by-side.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TypeGuard

import anyio
import msgspec

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.config.settings import EnvironmentSettings
from fleetbus.core.episode.history import Turn
from fleetbus_schemas import ChatMessage, EpisodeRequested, ToolSpec
from fleetbus_schemas.tokens import count_tokens
from fleetbus_workers.environment.base import NO_LIMITS, Ahead, AsksAhead, Environment, TurnLimits
from fleetbus_workers.environment.episode.policy_client import PolicyClient
from fleetbus_workers.environment.episode.seats import EpisodeSeats
from fleetbus_workers.environment.episode.segments import Placement
from fleetbus_workers.environment.normalization import clip_messages
from fleetbus_workers.environment.validation import validate_return

TEMPLATE_TOKENS = 256
KNOWN_TEMPLATE_TOKENS = 64
"""More than a template writes around the messages of a turn; where prompts of the episode were seen, most of it is in their
rate."""

SENDING_SECONDS = 2.0
"""How long an answer waits for what is being sent ahead, and may not be taken by a full log. That is asked for in its turn."""

MARGIN = 1.25
"""By so much more tokens a turn may have for its length than those before it."""

_encode = msgspec.msgpack.Encoder().encode


class AheadTurns:
    """The turns of one attempt that were told ahead and not played yet. At most ``most`` are under way; messages are cut to
    ``clip`` bytes, 0: they are not."""

    __slots__ = (
        "_asks_ahead",
        "_client",
        "_clip",
        "_first",
        "_is_answered",
        "_most",
        "_rate",
        "_request",
        "_sending",
        "_told",
        "_waiting",
    )

    def __init__(
        self,
        environment: Environment,
        client: PolicyClient,
        request: EpisodeRequested,
        *,
        most: int,
        clip: int,
    ) -> None:
        self._asks_ahead = environment if asks_ahead(environment) else None
        self._client = client
        self._request = request
        self._most = most
        self._clip = clip
        self._told: deque[Ahead] = deque()
        self._first = 0
        """The number of the first turn of those."""
        self._rate = math.inf
        """The most tokens by byte that a prompt of the episode had."""
        self._is_answered = False
        self._waiting: anyio.CancelScope | None = None
        self._sending: anyio.CancelScope | None = None

    def tell(self, told: Sequence[Ahead], turn: int) -> None:
        """These turns follow ``turn``, which is asked for next, and those that were told before."""
        self._drop_played(turn)
        if not self._told:
            self._first = turn + 1
        self._told += map(self._clip_messages, told)

    async def ask(
        self,
        turn: int,
        messages: tuple[ChatMessage, ...],
        tools: tuple[ToolSpec, ...],
        *,
        tokens_left: int,
        placement: Placement,
        seats: EpisodeSeats,
    ) -> Turn:
        """As `PolicyClient.ask`; meanwhile others that were told ahead are sent."""
        client = self._client
        self._drop_played(turn)
        if (self._told or self._asks_ahead is not None) and seats.other is None and client.takes_ahead():
            if not client.has_sent(turn):
                await client.send(turn, messages, tools, tokens_left=tokens_left, placement=placement, seats=seats)
            async with open_first_error_task_group() as tasks:
                self._is_answered = False
                left = tokens_left - self._bound(messages, tools, NO_LIMITS)
                tasks.start_soon(self._send_ahead, turn, placement, seats, left)
                answered = await client.ask(turn, messages, tools, tokens_left=tokens_left, placement=placement, seats=seats)
                self._is_answered = True
                if self._waiting is not None:
                    self._waiting.cancel()
                if self._sending is not None:
                    self._sending.deadline = anyio.current_time() + SENDING_SECONDS
        else:
            answered = await client.ask(turn, messages, tools, tokens_left=tokens_left, placement=placement, seats=seats)
        self._learn(messages, tools, answered)
        return answered

    async def _send_ahead(self, turn: int, placement: Placement, seats: EpisodeSeats, tokens_left: int) -> None:
        """Send what was told, then what is told until the answer is there, as far as it has room and a context of its own."""
        used, seated, last = {placement.segment}, {seats.current}, placement
        for number in range(1, min(self._most, self._request.max_turns - turn)):
            if self._is_answered or (len(self._told) < number and not await self._wait_for_next(turn)):
                return
            told = self._told[number - 1]
            change = seats.foresee(told) if told.context is not None or told.seat not in seated else None
            placed = None if change is None else last.foresee(change)
            if change is None or placed is None or placed.segment in used or any(each.images for each in told.messages):
                return
            bound = self._bound(told.messages, told.tools, told.limits)
            if bound > tokens_left:
                return
            if not self._client.has_sent(turn + number):
                tools = change.tools if placed.origin is not None else ()
                with anyio.CancelScope() as self._sending:
                    await self._client.send(
                        turn + number, told.messages, tools, tokens_left=tokens_left, placement=placed, seats=seats, ahead=told
                    )
            used.add(placed.segment)
            seated.add(told.seat)
            last, tokens_left = placed, tokens_left - bound

    async def _wait_for_next(self, turn: int) -> bool:
        """Wait until the environment tells a further turn; False if it does not, or the answer is there."""
        if self._asks_ahead is None:
            return False
        told = None
        with anyio.CancelScope() as self._waiting:
            told = await self._asks_ahead.ask_ahead()
        if told is not None:
            told = validate_return(Ahead, told, "ask_ahead", self._asks_ahead)
            self.tell((told,), turn)
        return told is not None

    def _bound(self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...], limits: TurnLimits) -> int:
        """More tokens than a turn adds, in all likelihood: turns side by side share those of the episode."""
        is_known = self._rate < math.inf
        rate, around = (self._rate * MARGIN, KNOWN_TEMPLATE_TOKENS) if is_known else (1.0, TEMPLATE_TOKENS)
        prompt = math.ceil(rate * len(_encode((messages, tools))))
        return prompt + around + limits.apply(self._request.sampling).max_tokens

    def _learn(self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...], turn: Turn) -> None:
        rate = count_tokens(turn.action.prompt_delta) / len(_encode((messages, tools)))
        self._rate = rate if self._rate == math.inf else max(self._rate, rate)

    def _drop_played(self, turn: int) -> None:
        """Forget those told turns that are the present one, or before it."""
        while self._told and self._first <= turn:
            self._told.popleft()
            self._first += 1

    def _clip_messages(self, told: Ahead) -> Ahead:
        return msgspec.structs.replace(told, messages=clip_messages(told.messages, self._clip)) if self._clip else told


def asks_ahead(environment: Environment) -> TypeGuard[AsksAhead]:
    """True if the environment may tell of later turns at any time."""
    return isinstance(environment, AsksAhead) and environment.asks_ahead


def goes_side_by_side(settings: EnvironmentSettings) -> bool:
    """False where each turn is shown what depends on those before it."""
    return settings.turns_at_once > 1 and settings.compaction == "off" and not settings.context_status
