"""Asks a judge: one request at a time per content, several at once, within a time; failures are `JudgeFailed`, never a score.

Above it are environments and the learner; below it httpx. The key goes into one header and nowhere else: no message of an
error quotes what the server answered.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import structlog

from fleetbus.config.training_settings import RewardSettings
from fleetbus.files import replace_file
from fleetbus_workers.judge.failure import JudgeFailed
from fleetbus_workers.judge.prompts import SCALE, build_messages, read_scores
from fleetbus_workers.serving.bounded_http import bound

MAX_ANSWER_BYTES = 4 << 20
MAX_KEPT = 4096
"""Scores kept in memory."""

MAX_WAIT_SECONDS = 8.0
"""Between two tries."""

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""

log = structlog.get_logger()


class _Busy(Exception):
    """Not now: the server says so, or cannot be reached."""


class Judge:
    """One server. ``url`` is its base; ``key`` is sent as a bearer token."""

    def __init__(self, settings: RewardSettings, *, rubric: str, key: str = "") -> None:
        self._settings = settings
        self._rubric = rubric
        self._model = settings.judge_model
        self._limiter = anyio.CapacityLimiter(settings.judge_concurrency)
        self._kept: OrderedDict[str, list[float]] = OrderedDict()
        self._asking: dict[str, anyio.Event] = {}
        self._cache = Path(settings.judge_cache) if settings.judge_cache else None
        self._client = httpx.AsyncClient(
            base_url=settings.judge_url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=settings.judge_seconds,
            limits=httpx.Limits(max_connections=settings.judge_concurrency),
            event_hooks=bound(httpx, max_bytes=MAX_ANSWER_BYTES),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def score(self, transcripts: Sequence[str]) -> list[float]:
        """One score per transcript, from 0 to 1. The same transcripts are asked about once. Raises `JudgeFailed`."""
        messages = build_messages(self._rubric, transcripts)
        content = json.dumps([self._settings.judge_model, self._settings.judge_max_tokens, messages])
        name = hashlib.sha256(content.encode()).hexdigest()
        while (asking := self._asking.get(name)) is not None:
            await asking.wait()
        if (known := await self._find(name, len(transcripts))) is not None:
            return known
        if name in self._asking:  # another began while a file was read
            return await self.score(transcripts)
        self._asking[name] = anyio.Event()
        try:
            async with self._limiter:
                scores = await self._ask_in_time(messages, len(transcripts))
            await self._keep(name, scores)
        finally:
            self._asking.pop(name).set()
        return scores

    async def _ask_in_time(self, messages: list[dict[str, str]], count: int) -> list[float]:
        wait, reason = 0.5, "no answer"
        with anyio.move_on_after(self._settings.judge_seconds):
            while True:
                try:
                    return read_scores(await self._ask(messages), count)
                except ValueError as error:
                    raise JudgeFailed(f"judge: {error}") from None
                except _Busy as error:
                    reason = str(error)
                await anyio.sleep(wait)
                wait = min(2 * wait, MAX_WAIT_SECONDS)
        raise JudgeFailed(f"judge: {reason} within {self._settings.judge_seconds:g} s")

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        if not self._model:
            listed = await self._request("GET", "/v1/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise JudgeFailed("judge: its server names no model: set reward.judge_model") from None
        settings = self._settings
        body = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": settings.judge_max_tokens}
        answer = await self._request("POST", "/v1/chat/completions", json=body)
        try:
            choice = answer["choices"][0]
            content, ending = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            content = ending = None
        if ending == "length":  # the last scores may be some that it quotes
            raise JudgeFailed("judge: its answer was cut: raise reward.judge_max_tokens")
        if not isinstance(content, str):
            raise JudgeFailed("judge: its answer has no text")
        return content

    async def _request(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = await self._client.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _Busy(f"{type(error).__name__}, no answer") from None
        if response.status_code in PASSING:
            raise _Busy(f"status {response.status_code}, no answer")
        if response.status_code != 200:
            raise JudgeFailed(f"judge: its server refuses, status {response.status_code}")
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise JudgeFailed("judge: its server's answer is no JSON") from None

    async def _find(self, name: str, count: int) -> list[float] | None:
        if (known := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return known
        if self._cache is None:
            return None
        try:
            return read_scores(await anyio.Path(self._cache / name).read_text(), count)
        except (OSError, ValueError):  # not there, or no whole answer: ask again
            return None

    async def _keep(self, name: str, scores: list[float]) -> None:
        self._kept[name] = scores
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if self._cache is None:
            return
        content = json.dumps({"scores": [round(SCALE * score, 9) for score in scores]}).encode()
        try:
            await anyio.to_thread.run_sync(replace_file, self._cache / name, content)
        except OSError as error:
            log.warning("judge's answer cannot be kept; continuing", reason=f"{type(error).__name__}: {error.strerror}")
