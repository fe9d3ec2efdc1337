"""The inference worker: pulls observations into free slots, answers each with an Action, follows the published policy.

Half of its slots serve its own lane (episodes that stick to it), half the lane that all workers share, so that neither can
starve the other and never more than ``slots`` observations are held. Beside workers of other runs in the same process it has a
fair share of slots instead. Compute happens in the engine, never on the event loop.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import anyio
import structlog

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.bus.streams import OBSERVATION_LEASE_SECONDS, inference_lanes, observations_consumer
from fleetbus.concurrency.runtime import Runtime
from fleetbus.concurrency.task_pool import TaskPool
from fleetbus.config.engines import find_max_model_len, is_frozen
from fleetbus.config.settings import Configuration
from fleetbus.delivery.control import Control, run_until_drained
from fleetbus.delivery.lanes import Lane, claim_lane
from fleetbus.delivery.leases import Leases
from fleetbus.delivery.shared_slots import RunSlots, SharedSlots
from fleetbus.delivery.slots import Slots
from fleetbus.delivery.worker_lifecycle import WorkerLifecycle, run_lifecycle
from fleetbus.errors import RequestUnanswered
from fleetbus.log.episodes import RETRY_SECONDS, decode_entries
from fleetbus.log.newest_version import find_newest_version, find_versions_before
from fleetbus_schemas import ANY_LANE, Heartbeat, LineageStarted, PolicyPublished, SlotShare, Subjects
from fleetbus_workers.inference.base import ImageSource, Sampler, Template, WeightsRejected
from fleetbus_workers.inference.engine_meter import EngineMeter
from fleetbus_workers.inference.observation_handler import PROBLEM_CHARS, ObservationHandler
from fleetbus_workers.inference.snapshots import PublishedVersions, SnapshotSampler
from fleetbus_workers.weights.transfer import ENGINE_COUNTER, PROCESSES_COUNTER, Fetch, WeightsReceiver

RELOAD_SECONDS = 5.0
LONGEST_RELOAD_SECONDS = 60.0
"""Until a version that was rejected is tried again, at first and at last: its file may have been on its way, and is as large as
the model."""

TRIES_AT_ONCE = 12
"""So many tries follow each other by the first of these, a minute; then the pauses double."""

TRIES_OF_THE_NEWEST = 3
"""After so many, of one version or of several that followed each other, a worker loads the newest of those before, which it may
have passed over: else it would answer nothing, or from the version that it had, while others go on."""

EARLIER_VERSIONS = 8
"""So many of those before are tried: files may be that many versions late, and what others sample is hardly trained."""

EARLIER_SECONDS = 60.0
"""None of them is begun later than this after the first: a disk that hangs takes its time for each."""

log = structlog.get_logger()


class InferenceWorker:
    """One engine on one lane. ``drain`` set ends `run` after what is held has been answered."""

    def __init__(
        self,
        bus: Bus,
        *,
        configuration: Configuration,
        name: str,
        drain: anyio.Event,
        lane: Lane,
        sampler: Sampler,
        template: Template,
        fetch: Fetch | None = None,
        discard_copies: Callable[[], None] = lambda: None,
        images: ImageSource | None = None,
        shared: SharedSlots | None = None,
        receiver: WeightsReceiver | None = None,
    ) -> None:
        self._bus = bus
        self._fetch = fetch or _keep
        self._discard_copies = discard_copies
        self._policy = configuration.run.policy
        self._is_frozen = is_frozen(configuration.inference)
        self._slot_count = configuration.inference.slots
        self._lane_slots = self._slot_count // 2  # none of a single slot: then no episode may stick to this lane
        self._drain_seconds = configuration.limits.drain
        self._subjects = Subjects(configuration.run.name)
        self._name = name
        self._drain = drain
        self._lane = lane
        self._sampler = sampler
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._receiver = receiver
        if receiver is not None:
            self._counters[ENGINE_COUNTER] = 0.0
            if receiver.processes > 1:
                self._counters[PROCESSES_COUNTER] = float(receiver.processes)
        self._leases = Leases(OBSERVATION_LEASE_SECONDS / 3, OBSERVATION_LEASE_SECONDS)
        self._handler = ObservationHandler(
            bus,
            self._subjects,
            worker=name,
            lane=lane.name if self._lane_slots else ANY_LANE,
            sampler=sampler,
            template=template,
            max_model_len=find_max_model_len(configuration.inference),
            max_tries=configuration.environment.max_hops,
            leases=self._leases,
            counters=self._counters,
            images=images,
        )
        self._shared = shared
        self._run = configuration.run.name
        self._slots: Slots | RunSlots = Slots(bus, self._handler.handle_delivery)
        self._ready = anyio.Event()
        self._published: tuple[StreamEntry, PolicyPublished] | None = None
        """The newest version that was published, until it is begun to be loaded."""
        self._first_position = 0
        """Where the first one stands that was published since."""
        self._arrived = anyio.Event()
        self._weights_problem = ""
        self._engine_meter = EngineMeter(sampler, anyio.current_time())

    async def run(self) -> None:
        """Work until drained; cancelled, it drops everything, and others answer when the leases run out."""
        with self._open_slots() as self._slots:
            await self._serve()

    def _open_slots(self) -> AbstractContextManager[Slots | RunSlots]:
        if self._shared is None:
            return nullcontext(self._slots)
        return self._shared.join(self._run, self._bus, self._handler.handle_delivery)

    async def _serve(self) -> None:
        bus, subjects = self._bus, self._subjects
        lifecycle = WorkerLifecycle(
            bus, subjects, role="inference", worker=self._name, beat=self._build_heartbeat, lane=self._lane
        )
        control = Control(
            bus, subjects, role="inference", worker=self._name, drain=self._drain, busy_with=lambda: self._handler.turns
        )
        async with (
            self._sampler.run(),
            run_lifecycle(lifecycle, bus, self._lane, slots=self._count_slots(), share=self._describe_share()),
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._leases.run)
            group.start_soon(self._handler.deadlines.run)
            group.start_soon(self._handler.actions.run)
            group.start_soon(control.run)
            if self._is_frozen:
                self._ready.set()
            else:
                group.start_soon(self._follow_policy)
                group.start_soon(self._load_versions)
            if self._receiver is not None:
                group.start_soon(self._receiver.run)
            await self._answer_observations(lifecycle)
            group.cancel_scope.cancel()

    async def _follow_policy(self) -> None:
        """Note each version as it is published, the newest known one first. Learners that begin stand beside them."""
        subject = self._subjects.policy(self._policy)
        async with self._bus.read([subject], start=await self._find_newest_position(subject)) as reader:
            while True:
                for entry, published in decode_entries(PolicyPublished, [await reader.receive()], beside=(LineageStarted,)):
                    if published.policy != self._policy:
                        log.error("version of another policy; ignoring it", version=published.version, policy=published.policy)
                        continue
                    self._first_position = entry.sequence if self._published is None else self._first_position
                    self._published = entry, published
                    self._arrived.set()

    async def _load_versions(self) -> None:
        """Load the newest version, and pass over those that came before it while another was loaded: a worker that takes longer
        for one than a step lasts would be further behind with each.

        A rejected version is tried again until there is a newer one, in the end once a minute: a worker that stays behind
        makes every group that it takes part in stale.
        """
        wanted: PolicyPublished | None = None
        tries, pause, position = 0, math.inf, 0
        rejected, looked_before = 0, 0  # tries since a newest one was loaded; before which position another was looked for
        while True:
            with anyio.move_on_after(pause if wanted is not None else math.inf):
                await self._arrived.wait()
            if self._published is not None:
                (entry, wanted), self._published, self._arrived = self._published, None, anyio.Event()
                tries, position = 0, entry.sequence
                self._handler.expect_version(self._first_position)
            if wanted is not None and await self._load_version(wanted):
                wanted, rejected = None, 0
            elif wanted is not None:
                tries, rejected = tries + 1, rejected + 1
                pause = RELOAD_SECONDS if tries <= TRIES_AT_ONCE else min(2 * pause, LONGEST_RELOAD_SECONDS)
                if rejected >= TRIES_OF_THE_NEWEST and (position != looked_before or not self._ready.is_set()):
                    problem = self._weights_problem
                    looked_before = position if await self._load_earlier(wanted, position) else looked_before
                    self._weights_problem = problem  # the newest's
            self._handler.clear_expected_version()

    async def _load_earlier(self, newest: PolicyPublished, position: int) -> bool:
        """Load the newest version before one at that position of the log, which cannot be had, if there is any that is newer
        than the loaded one; False if the log does not say."""
        subject = self._subjects.policy(self._policy)
        try:
            earlier = await find_versions_before(self._bus, subject, position, most=EARLIER_VERSIONS)
        except RequestUnanswered as unanswered:
            log.warning("log read failed; continuing", reason=str(unanswered))
            return False
        loaded = self._sampler.version if self._ready.is_set() else -1
        begun_at = anyio.current_time()
        for published in reversed([each for each in earlier if each.policy == self._policy and each.version > loaded]):
            if anyio.current_time() - begun_at >= EARLIER_SECONDS:
                break
            if await self._load_version(published):
                log.warning("a version before the newest is loaded", version=published.version, newest=newest.version)
                break
        return True

    async def _find_newest_position(self, subject: str) -> int:
        """Find the newest version in the log, or where to begin if there is none, however long the server is away."""
        while True:
            try:
                newest = await find_newest_version(self._bus, subject)
                return newest[0] if newest is not None else 1
            except RequestUnanswered as unanswered:
                log.warning("log read failed; retrying", subject=subject, reason=str(unanswered))
                await anyio.sleep(RETRY_SECONDS)

    async def _load_version(self, published: PolicyPublished) -> bool:
        """True if there is nothing left to do about this version."""
        if published.version <= self._sampler.version and self._ready.is_set():
            return True
        try:
            if not await self._load_transferred(published):
                await self._load_fetched(await self._fetch(published))
        except WeightsRejected as rejected:
            self._counters["weights_rejected"] += 1
            log.error("weights rejected; retrying", version=published.version, reason=str(rejected))
            self._weights_problem = f"weights of version {published.version} rejected: {rejected}"[:PROBLEM_CHARS]
            return False
        self._weights_problem = ""
        self._counters["versions_loaded"] += 1
        self._ready.set()
        return True

    async def _load_fetched(self, published: PolicyPublished) -> None:
        try:
            await self._sampler.load(published)
        except WeightsRejected:
            self._discard_copies()
            raise

    async def _load_transferred(self, published: PolicyPublished) -> bool:
        """True if the version came from the learner itself, and is loaded. Raises `WeightsRejected`."""
        if self._receiver is None or not await self._receiver.load(published, self._fetch):
            return False
        self._counters[ENGINE_COUNTER] += 1
        return True

    async def _answer_observations(self, lifecycle: WorkerLifecycle) -> None:
        """Pull once a version is loaded, until drained; then answer what is held."""
        sources = {
            observations_consumer(self._policy, self._lane.name): self._lane_slots,
            observations_consumer(self._policy, ANY_LANE): self._slot_count - self._lane_slots,
        }
        async with anyio.create_task_group() as answering:
            await run_until_drained(self._drain, self._ready.wait)  # nothing is pulled before a version is loaded
            await self._slots.run(sources, self._drain, TaskPool(answering))
            await lifecycle.publish_draining(in_flight=self._slots.in_flight)
            with anyio.move_on_after(self._drain_seconds):
                await self._slots.wait_until_idle()
                await self._handler.actions.wait_until_idle()
            answering.cancel_scope.cancel()

    def _build_heartbeat(self) -> Heartbeat:
        counted = self._engine_meter.read_counters()
        return Heartbeat(
            role="inference",
            worker=self._name,
            slots=self._count_slots(),
            in_flight=self._slots.in_flight,
            policy_version=-1 if self._is_frozen else self._sampler.version,
            lane=self._lane.name,
            draining=self._drain.is_set(),
            counters=dict(self._counters) | {f"engine_{name}": float(value) for name, value in counted.items()},
            problem=self._weights_problem or self._handler.problem,
            engine=None if self._is_frozen else self._engine_meter.measure(anyio.current_time()),
            share=self._describe_share(),
            policy=self._policy,
            takes_ahead=self._handler.takes_ahead,
        )

    def _count_slots(self) -> int:
        return self._slot_count if self._shared is None else self._shared.count_slots(self._run)

    def _describe_share(self) -> SlotShare | None:
        return None if self._shared is None else self._shared.describe(self._run)


async def run_inference(
    bus: Bus,
    *,
    configuration: Configuration,
    name: str,
    drain: anyio.Event,
    sampler: Sampler,
    template: Template,
    runtime: Runtime | None = None,
    fetch: Fetch | None = None,
    discard_copies: Callable[[], None] = lambda: None,
    images: ImageSource | None = None,
    shared: SharedSlots | None = None,
    receiver: WeightsReceiver | None = None,
) -> None:
    """An inference worker from claiming a lane to its last entry. ``fetch`` makes a published version a local file first,
    and copies that an engine rejected are discarded before the next;
    ``images`` shows what observations refer to, to a model that sees; ``shared`` has the slots of a process that serves more
    runs than this one; ``receiver`` has versions before their files are read. With ``inference.versions_of`` each turn is
    answered from the version that it asks for."""
    subjects = Subjects(configuration.run.name)
    if configuration.inference.versions_of:
        served = [subjects.policy(policy) for policy in (configuration.inference.versions_of, configuration.run.policy)]
        versions = PublishedVersions(bus, served, fetch)
        sampler, receiver = SnapshotSampler(sampler, versions.find, discard_copies), None
    nonce = (runtime or Runtime()).nonce()
    lanes = inference_lanes(configuration.nats.lanes)
    lane = await claim_lane(bus, subjects, role="inference", names=lanes, worker=name, nonce=nonce)
    worker = InferenceWorker(
        bus,
        configuration=configuration,
        name=name,
        drain=drain,
        lane=lane,
        sampler=sampler,
        template=template,
        fetch=fetch,
        discard_copies=discard_copies,
        images=images,
        shared=shared,
        receiver=receiver,
    )
    await worker.run()


async def _keep(published: PolicyPublished) -> PolicyPublished:
    """`Fetch` where all versions are local files."""
    return published
