"""One Observation becomes one Action: history, template delta, sampling, storing (docs/concepts/delivery.md, rules 4, 5, 9).

The Observation is acked only when an Action for its turn stands in the log, or when no worker waits for one any more.
"""

import math
from collections import defaultdict
from contextlib import nullcontext

import anyio
import msgspec
import structlog

from fleetbus.bus.base import Delivery, LogBus
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS
from fleetbus.concurrency.deadlines import Deadlines
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.core.episode.history import shift_images
from fleetbus.delivery.leases import Leases
from fleetbus.log.stored_entries import decode_one
from fleetbus.logs.trace_context import name_episode
from fleetbus_schemas import Action, ChatMessage, MalformedMessage, Observation, ShownImage, Subjects, encode
from fleetbus_schemas.tokens import extend_history, pack_ids, pack_logprobs
from fleetbus_workers.images.reader import ImageFailed, ImageNotFetched
from fleetbus_workers.inference.action_store import ActionStore
from fleetbus_workers.inference.base import (
    EngineFailed,
    Generation,
    GenerationRequest,
    ImageSource,
    PromptDelta,
    RequestRefused,
    Sampler,
    Template,
    name_history,
)
from fleetbus_workers.inference.history_cache import History, HistoryCache, HistoryMismatch, StaleObservation
from fleetbus_workers.inference.pinned_versions import HoldsVersions, wait_for_version
from fleetbus_workers.inference.stops import end_at_stop
from fleetbus_workers.inference.turn_rules import (
    VersionSuperseded,
    check_pinned_version,
    compute_turn_seed,
    describe_lack_of_room,
    find_lack_of_room,
    render_conversation,
)

PROBLEM_CHARS = 500
"""Of a problem that heartbeats tell."""

LONGEST_ANSWER_SECONDS = 3600.0
"""For an observation whose deadline says nothing. It is dropped then, as an engine may never answer, or the episode be over:
not acked, it would keep all that follows in the log. Who still waits for its answer asks again."""

log = structlog.get_logger()


class ObservationHandler:
    """Answers observations, at most one task per (episode, attempt, turn)."""

    def __init__(
        self,
        bus: LogBus,
        subjects: Subjects,
        *,
        worker: str,
        lane: str,
        sampler: Sampler,
        template: Template,
        max_model_len: int,
        max_tries: int,
        leases: Leases,
        counters: defaultdict[str, float],
        images: ImageSource | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._worker = worker
        self._lane = lane
        self._sampler = sampler
        self._versions = sampler if isinstance(sampler, HoldsVersions) else None
        self._template = template
        self._images = images
        self._max_model_len = max_model_len
        self._max_tries = max_tries
        self._leases = leases
        self._counters = counters
        self._histories = HistoryCache(bus, subjects, with_messages=template.renders_history)
        self._busy: dict[str, dict[str, Observation]] = {}
        """By turn in work its observations by lease, in order: one, and those that were routed again."""
        self.actions = ActionStore(bus, self._busy, counters, self._forget_history)
        """Its `ActionStore.run` runs beside this."""
        self._expected_sequence = math.inf
        self._version_loaded = anyio.Event()
        self._now = get_clock()
        self.deadlines = Deadlines()
        """Of the observations in work; its `Deadlines.run` runs beside them."""
        self.problem = ""
        """Why the engine answered nothing the last time it was asked, in one line; empty if it did."""

    @property
    def takes_ahead(self) -> bool:
        """True if it answers turns that are asked for ahead of others. A template that renders whole conversations may begin
        segments of its own, which those after it do not count."""
        return not self._template.renders_history

    @property
    def turns(self) -> tuple[str, ...]:
        """Turns in work, as ``episode.attempt.turn``."""
        return tuple(self._busy)

    def expect_version(self, sequence: int) -> None:
        """A version that was published at this position of the log is about to be loaded: episodes that were asked for after
        it begin with it. Begun with the one before, they would be a step staler than their request."""
        self._expected_sequence = sequence

    def clear_expected_version(self) -> None:
        """The announced version was loaded or rejected; stop waiting for it."""
        self._expected_sequence = math.inf
        self._version_loaded.set()
        self._version_loaded = anyio.Event()

    async def handle_delivery(self, delivery: Delivery) -> None:
        """Handle one delivery to its end. A repetition of what is in work only renews the lease."""
        message = delivery.message
        try:
            observation = decode_one(Observation, message)
        except MalformedMessage as malformed:
            self._counters["malformed"] += 1
            log.error("observation is malformed; ignoring it", reason=str(malformed))
            await delivery.ack()
            return
        turn = f"{observation.episode_id}.{observation.attempt}.{observation.turn}"
        lease = f"{turn}.{message.sequence}"
        self._leases.hold(lease, delivery)
        if turn in self._busy:
            self._busy[turn].setdefault(lease, observation)
            return
        waiting = self._busy[turn] = {lease: observation}
        if observation.ahead:
            await self.actions.start(turn, self._handle_turn, turn, waiting)
        else:
            await self._handle_turn(turn, waiting)

    async def _handle_turn(self, turn: str, waiting: dict[str, Observation]) -> None:
        """Handle a turn to its end."""
        observation = next(iter(waiting.values()))
        try:
            structlog.contextvars.bind_contextvars(
                **name_episode(observation), attempt=observation.attempt, turn=observation.turn
            )
            await self._handle_newest(waiting)
        except EngineFailed as failed:
            self._counters["engine_failed"] += 1
            self.problem = f"engine failed: {' '.join(str(failed).split())}"[:PROBLEM_CHARS]
            log.warning("engine failed; leaving the observation to another worker", reason=str(failed))
        finally:
            del self._busy[turn]
            self.actions.end(turn)
            for lease in waiting:
                self._leases.take(lease)
            structlog.contextvars.unbind_contextvars("episode", "deadline_ns", "attempt", "turn")  # the task is used again

    async def _handle_newest(self, waiting: dict[str, Observation]) -> None:
        """One answer serves all observations of a turn. What refuses one says nothing of the newest, which was routed again
        and may expect another Action before its own."""
        while waiting:
            lease, observation = next(reversed(waiting.items()))
            delivery = self._leases.get(lease)
            if delivery is None or await self._answer(observation, delivery):
                break
            del waiting[lease]
            await self._ack(lease)
        for lease in tuple(waiting):
            await self._ack(lease)

    async def _ack(self, lease: str) -> None:
        delivery = self._leases.take(lease)
        if delivery is not None:
            await delivery.ack()

    async def _answer(self, observation: Observation, delivery: Delivery) -> bool:
        """Answer it; False if the log refused the answer. Past the deadline no answer is needed: the episode's worker records
        the timeout. If it asked past the deadline, the server's clock was set, which it does not go by."""
        if observation.ahead and not self.takes_ahead:
            return False
        sequence, asked_ns, deadline_ns = delivery.message.sequence, delivery.message.time_ns, observation.deadline_ns
        is_timed = asked_ns < deadline_ns
        remaining_seconds = (deadline_ns - self._bus.now_ns()) / 1e9 if is_timed else LONGEST_ANSWER_SECONDS
        with self.deadlines.open(self._now() + remaining_seconds) as deadline:
            try:
                action = await self._build_action(observation, delivery)
                return await self._store_action(observation, msgspec.structs.replace(action, observation_sequence=sequence))
            except StaleObservation as stale:
                self._counters["stale"] += 1
                log.info("observation is stale; dropping it", reason=str(stale))
        if deadline.is_over:
            self._counters["expired"] += 1
        return True

    async def _build_action(self, observation: Observation, delivery: Delivery) -> Action:
        if observation.hop + self._count_lost_tries(delivery) > self._max_tries:
            return self._build_failed_action(observation, "poison_observation", f"tried {self._max_tries} times")
        try:
            history = await self._histories.take_or_rebuild(observation)
            return await self._sample_action(observation, history)
        except HistoryMismatch as mismatch:
            return self._build_failed_action(observation, "history_mismatch", str(mismatch))
        except VersionSuperseded as gone:
            return self._build_failed_action(observation, "version_gone", str(gone))
        except RequestRefused as refused:
            return self._build_failed_action(observation, "engine_refused", str(refused))
        except ImageFailed as failed:
            return self._build_failed_action(observation, failed.error_class, str(failed))
        except ImageNotFetched as unread:
            raise EngineFailed(str(unread)) from unread

    def _count_lost_tries(self, delivery: Delivery) -> int:
        """Deliveries before this one that may have ended the worker that had them: each is repeated when its lease is over, no
        sooner. Sooner comes what a worker handed back, and what never arrived while a server was restarted
        (docs/decisions/0197-tries-that-nobody-died-of.md). Where the clock of the server that stored it is ahead of ours, all
        count: they would be subtracted otherwise."""
        age_seconds = (self._bus.now_ns() - delivery.message.time_ns) / 1e9
        if age_seconds < -OBSERVATION_LEASE_SECONDS / 2:
            return delivery.delivered - 1
        return min(delivery.delivered - 1, round(age_seconds / OBSERVATION_LEASE_SECONDS))

    async def _sample_action(self, observation: Observation, history: History) -> Action:
        received = self._now()
        repeated = History(digest=b"", ids=[])
        conversation = (*history.messages, *observation.messages) if self._template.renders_history else ()
        try:
            rendered: list[int] | None = None
            if self._template.renders_history:
                observation, rendered = render_conversation(self._template, observation, history, conversation)
            if observation.origin is not None:
                history, repeated = history.leave(observation.origin)
            if rendered is not None:
                delta = PromptDelta(ids=rendered[len(history.ids) :])
            else:
                delta = await self._encode_prompt_delta(observation, history, repeated)
        except (HistoryMismatch, ImageFailed, ImageNotFetched, RequestRefused):
            raise
        except Exception as error:  # noqa: BLE001 - a template is a model's own code, and may fail in any way on what it is shown
            return self._build_failed_action(observation, "template_failed", f"{type(error).__name__}: {error}")
        ids = history.ids
        images = (*history.images, *shift_images(delta.images, len(ids)))
        ids += delta.ids
        room = min(observation.tokens_left - len(delta.ids), self._max_model_len - len(ids), observation.sampling.max_tokens)
        if room < 1:
            return self._fill_action(
                observation,
                finish_reason="length",
                history_hash=observation.history_hash,
                error_class=find_lack_of_room(observation, len(delta.ids), len(ids), self._max_model_len),
                error=describe_lack_of_room(observation, len(ids), self._max_model_len),
            )
        if observation.request_sequence > self._expected_sequence:
            await self._version_loaded.wait()
        pinned, versions = observation.pinned_version, self._versions
        if versions is None and pinned is not None:
            await wait_for_version(self._bus, self._subjects.policy(observation.policy), self._sampler, pinned)
        async with nullcontext() if versions is None else versions.hold(pinned):
            started = self._now()
            generation = await self._sampler.generate(await self._build_request(observation, ids, images, room))
        check_pinned_version(observation.pinned_version, generation)
        generation = end_at_stop(generation, observation.sampling.stop, self._template.decode_text)
        prompt_delta, sampled = pack_ids(delta.ids), pack_ids(generation.ids)
        digest = extend_history(history.digest, prompt_delta, sampled, [image.object for image in delta.images])
        ids += generation.ids
        text = self._template.decode_text(generation.ids)
        parsed = self._template.parse_text(text, history.tools, calls_before=history.calls)
        calls = history.calls + len(parsed.calls)
        if conversation:
            conversation = (*conversation, ChatMessage(role="assistant", content=text))
        self._histories.put(
            name_history(observation.episode_id, observation.segment),
            History(digest=digest, ids=ids, images=images, tools=history.tools, calls=calls, messages=conversation),
        )
        self._count(generation, len(delta.ids))
        if observation.origin is not None:
            self._counters["segments"] += 1
            self._counters["tokens_kept"] += observation.origin.kept
        return self._fill_action(
            observation,
            text=text,
            tool_calls=parsed.calls,
            tool_call_errors=parsed.errors if history.tools else (),
            prompt_delta=prompt_delta,
            images=delta.images,
            sampled=sampled,
            logprobs=pack_logprobs(generation.logprobs),
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            history_hash=digest,
            seconds_queued=round(started - received, 6),
            seconds_generating=round(self._now() - started, 6),
        )

    async def _encode_prompt_delta(self, observation: Observation, history: History, repeated: History) -> PromptDelta:
        """The ids that this turn's messages become, after those that a new segment repeats."""
        if observation.history_hash:
            ids = self._template.encode_continuation((repeated.ids or history.ids)[-1:], observation.messages)
        else:
            ids = self._template.encode_prompt(observation.messages, observation.tools)
        if self._images is not None:
            delta = await self._images.expand(ids, observation.messages)
            images = (*repeated.images, *shift_images(delta.images, len(repeated.ids)))
            return PromptDelta(ids=repeated.ids + delta.ids, images=images) if repeated.ids else delta
        if history.images or repeated.images or any(message.images for message in observation.messages):
            raise RequestRefused("this worker's model reads text only, and the episode contains images")
        return PromptDelta(ids=repeated.ids + ids if repeated.ids else ids)

    async def _build_request(
        self, observation: Observation, ids: list[int], images: tuple[ShownImage, ...], room: int
    ) -> GenerationRequest:
        stop_ids = self._template.stop_ids
        if observation.sampling.stop:
            stops = (self._template.token_to_id(token) for token in observation.sampling.stop)
            stop_ids |= {stop for stop in stops if stop is not None}
        return GenerationRequest(
            cache_key=observation.episode_id,
            ids=ids,
            sampling=observation.sampling,
            stop_ids=stop_ids,
            max_tokens=room,
            seed=compute_turn_seed(observation),
            trained=observation.trained and observation.pinned_version is None,
            images=await self._images.load_images(images) if self._images is not None and images else (),
            segment=observation.segment,
            parent=observation.origin.parent if observation.origin is not None and observation.origin.kept else None,
        )

    async def _store_action(self, observation: Observation, action: Action) -> bool:
        """Store the Action, or find that it stands there already; False if the observation is outdated."""
        subject = self._subjects.action(observation.environment_lane, observation.episode_id)
        try:
            payload = encode(action, subject=subject)
        except MalformedMessage as malformed:
            payload = encode(self._build_failed_action(observation, "oversized", malformed.reason), subject=subject)
        return await self.actions.store(observation, action, subject, payload)

    def _forget_history(self, action: Action) -> None:
        self._histories.forget(name_history(action.episode_id, action.segment))
        self._sampler.forget(action.episode_id)

    def _build_failed_action(self, observation: Observation, error_class: str, error: str) -> Action:
        self._counters[f"failed_{error_class}"] += 1
        log.error("action failed; storing the failure", error_class=error_class, reason=error)
        return self._fill_action(
            observation,
            finish_reason="failed",
            error_class=error_class,
            error=error,
            history_hash=observation.history_hash,
        )

    def _fill_action(self, observation: Observation, *, text: str = "", **fields: object) -> Action:
        return Action(
            episode_id=observation.episode_id,
            attempt=observation.attempt,
            turn=observation.turn,
            hop=observation.hop,
            text=text,
            worker=self._worker,
            lane=self._lane,
            segment=observation.segment,
            origin=observation.origin,
            **fields,  # type: ignore[arg-type]
        )

    def _count(self, generation: Generation, delta: int) -> None:
        self.problem = ""
        self._counters["actions"] += 1
        self._counters["tokens_sampled"] += len(generation.ids)
        self._counters["tokens_prompt"] += delta
        self._counters["histories_rebuilt"] = self._histories.rebuilt
