"""The rights that each user of a run needs on the bus, as data: every account and right is derived from here. Pure.

A run has an account that holds its streams, and an account per role. JetStream's API is a set of subjects, so a need is a
subject: a role's account imports those of its needs that the run's account serves, and what other roles serve or tell. A
permission alone would not do: the server checks which subject a question goes to, not which subject its answer goes to. In an
account of its own an answer reaches nothing but what the account imports, so it does no more than the role may do anyway.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fleetbus.bus.objects import weights_bucket
from fleetbus.bus.streams import API, IMPORTED_API, RunPlan, work_alias
from fleetbus_schemas import ANY_LANE, Subjects

USERS = ("admin", "operator", "environment", "inference", "learner", "recorder", "gateway", "monitor")
WORKERS = ("environment", "inference", "learner", "recorder", "gateway")
"""Users that say of themselves that they live, and take control requests."""

USER_OF: dict[str, str] = {
    "init": "admin",
    "up": "admin",
    "cancel": "operator",
    "drain": "operator",
    "pause": "operator",
    "evaluate": "operator",
    **{user: user for user in USERS},
}
"""Which user a role or command is; any other only reads, and is a ``monitor``."""

NARROW_READERS = frozenset({"inference", "gateway"})
"""Users that read the log by consumers with a filter alone: a batched direct get names its subjects where no permission sees
them. Costs a few milliseconds where a history is rebuilt, and keeps tasks and their verifiers from them."""

_SERVICES = "$SRV.>"


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Messages on ``subject`` that the run's account takes; ``target`` is their subject there if it is another one.
    ``streamed``: a question with any number of answers."""

    subject: str
    target: str = ""
    streamed: bool = False


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that one user of one run may do, besides talking to itself on its inbox.

    ``asks``: of the run's account. ``calls`` and ``hears``: (role, subject) of other roles' services and broadcasts. ``serves``
    and ``tells``: its own. ``listens``: a subject with wildcards that it subscribes to in place of those that it hears.
    ``everything``: all of the run's account, which holds the streams.
    """

    asks: tuple[Need, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    hears: tuple[tuple[str, str], ...] = ()
    serves: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()
    listens: tuple[str, ...] = ()
    everything: bool = False

    @property
    def publish(self) -> tuple[str, ...]:
        """The subjects that it may publish to."""
        if self.everything:
            return (">",)
        return _deduplicate((need.subject for need in self.asks), (subject for _, subject in self.calls), self.tells)

    @property
    def subscribe(self) -> tuple[str, ...]:
        """The subjects that it may subscribe to."""
        return (">",) if self.everything else _deduplicate((subject for _, subject in self.hears), self.listens, self.serves)


def get_user(role: str) -> str:
    """The user that a role, or a command of that name, connects as."""
    return USER_OF.get(role, "monitor")


def build_inbox_prefix(user: str) -> str:
    """The prefix of the subjects on which a user gets its answers."""
    return f"_INBOX_{user}"


def build_rights(user: str, plan: RunPlan, names: Mapping[str, str] | None = None) -> Rights:
    """The rights of ``user`` in one run. ``names``: what the durable consumers of the plan are called on the server, where
    they have names that cannot be guessed (`fleetbus.auth.consumer_names`); without, as in the plan."""
    return _RIGHTS[user](_RunSubjects(plan, names or {}))


def _deduplicate(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subject for part in parts for subject in part))


def _needs(*subjects: str) -> tuple[Need, ...]:
    return tuple(Need(subject=subject) for subject in subjects)


def _api(*questions: str, streamed: bool = False) -> tuple[Need, ...]:
    return tuple(
        Need(subject=f"{IMPORTED_API}.{question}", target=f"{API}.{question}", streamed=streamed) for question in questions
    )


class _RunSubjects:
    """The subjects of one run, and what it takes to read and to pull."""

    def __init__(self, plan: RunPlan, names: Mapping[str, str]) -> None:
        self.plan = plan
        self.names = names
        self.subjects = Subjects(plan.run)
        self.log = plan.log.name
        self.bucket = weights_bucket(plan.run)
        self.stream_info = _api(f"STREAM.INFO.{self.log}")
        self.direct = f"DIRECT.GET.{self.log}"
        self.read_directly = _api(self.direct, f"{self.direct}.>", streamed=True)

    def allow_worker_reports(
        self, role: str, *asks: Need, calls: Iterable[tuple[str, str]] = (), hears: Iterable[str] = ()
    ) -> Rights:
        """Rights to send heartbeats and to be controlled, which a worker needs besides those of every worker. ``hears``
        are roles whose heartbeats it listens to."""
        own = (*self.stream_info, *_needs(self.subjects.life(role, "*")))
        hosted = (self.subjects.rpc("*", "*"),) if role == "environment" else ()
        return Rights(
            asks=(*own, *asks),
            calls=tuple(calls),
            hears=self.heartbeats(*hears),
            serves=(self.subjects.control(role, "*"), _SERVICES, *hosted),
            tells=(self.subjects.heartbeat(role, "*"),),
        )

    def heartbeats(self, *roles: str) -> tuple[tuple[str, str], ...]:
        return tuple((role, self.subjects.heartbeat(role, "*")) for role in roles)

    def control(self, *roles: str) -> tuple[tuple[str, str], ...]:
        return tuple((role, self.subjects.control(role, "*")) for role in roles)

    @property
    def sessions(self) -> tuple[str, str]:
        """Step-wise sessions, called where they are hosted."""
        return ("environment", self.subjects.rpc("*", "*"))

    def lane(self, role: str) -> tuple[Need, ...]:
        """To claim, renew and look up the lanes of a role."""
        subject = self.subjects.lane(role, "*")
        return (*_needs(subject), *_api(f"DIRECT.GET.{self.plan.lanes.name}.{subject}"))

    def pull(self, prefix: str) -> tuple[Need, ...]:
        """To take work from the durable consumers whose names begin like this, and to ack it."""
        return self._consumer_needs(prefix, "", ("CONSUMER.MSG.NEXT", "CONSUMER.INFO"), acks=True)

    def progress(self, prefix: str, suffix: str = "") -> tuple[Need, ...]:
        """To ask how far the durable consumers got whose names begin and end like this."""
        return self._consumer_needs(prefix, suffix, ("CONSUMER.INFO",))

    def _consumer_needs(self, prefix: str, suffix: str, verbs: Sequence[str], *, acks: bool = False) -> tuple[Need, ...]:
        needs: list[Need] = []
        for consumer in self.plan.consumers:
            if consumer.name.startswith(prefix) and consumer.name.endswith(suffix):
                known = f"{work_alias(self.plan.run)}.{consumer.name}"
                name = f"{self.log}.{self.names.get(consumer.name, consumer.name)}"
                for verb in verbs:
                    subject, target = f"{IMPORTED_API}.{verb}.{known}", f"{API}.{verb}.{name}"
                    needs.append(Need(subject=subject, target=target, streamed=verb == "CONSUMER.MSG.NEXT"))
                if acks:
                    needs += _needs(f"$JS.ACK.{name}.>")
        return tuple(needs)

    def read(self, *filters: str) -> tuple[Need, ...]:
        """To follow and scan these subjects by own consumers; without any, the whole log. They have names that nobody
        can guess, as the durable ones have: who may pull from any consumer can pull from those alone whose name it knows."""
        creations = [f"CONSUMER.CREATE.{self.log}.*.{subject}" for subject in filters]
        whole = () if filters else (*_api(f"CONSUMER.CREATE.{self.log}.>"), *self.read_directly)
        own = _api(f"CONSUMER.INFO.{self.log}.*", f"CONSUMER.DELETE.{self.log}.*")
        return (*_api(*creations), *whole, *own, *_api(f"CONSUMER.MSG.NEXT.{self.log}.*", streamed=True))

    def allow_object_reads(self) -> tuple[Need, ...]:
        """To read from the run's object bucket."""
        stream = f"OBJ_{self.bucket}"
        direct = f"DIRECT.GET.{stream}"
        return (*_api(f"STREAM.INFO.{stream}"), *_api(direct, f"{direct}.>", streamed=True))

    def allow_object_writes(self) -> tuple[Need, ...]:
        """To store in it, and to clear away what was stored in part. Weights are checked against the digests in `policy.>`."""
        purge = _api(f"STREAM.PURGE.OBJ_{self.bucket}")
        return (*self.allow_object_reads(), *purge, *_needs(f"$O.{self.bucket}.C.*", f"$O.{self.bucket}.M.*"))


def _build_admin_rights(run: _RunSubjects) -> Rights:
    """Declares streams and consumers: `init`, `up`."""
    return Rights(everything=True, hears=run.heartbeats(*WORKERS))


def _build_environment_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    said = _needs(subjects.observation("*", "*", "*"), subjects.episode("*"), subjects.session("*"))
    work = (*run.lane("environment"), *run.pull("task_"), *run.pull("act_"), *run.read_directly, *run.allow_object_writes())
    waiting = run.progress("obs_", f"_{ANY_LANE}")
    return run.allow_worker_reports("environment", *said, *work, *waiting, calls=run.control("inference"), hears=("inference",))


def _build_inference_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    actions = subjects.action("*", "*")
    said = (*_needs(actions), *_api(f"{run.direct}.{actions}", f"{run.direct}.{subjects.policy('*')}"))
    read = run.read(subjects.policy("*"), subjects.episode("*"), subjects.observation("*", "*", "*"), actions)
    return run.allow_worker_reports(
        "inference", *said, *run.lane("inference"), *run.pull("obs_"), *read, *run.allow_object_reads()
    )


def _build_learner_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    said = _needs(subjects.task("*", "*"), subjects.episode("*"), subjects.policy("*"), subjects.train("*"), subjects.floor)
    return run.allow_worker_reports("learner", *said, *run.read(), *run.allow_object_writes())


def _build_recorder_rights(run: _RunSubjects) -> Rights:
    """Removes what is archived. It needs the names of all consumers to know how far they got."""
    keeping = (*_api(f"CONSUMER.LIST.{run.log}", f"STREAM.PURGE.{run.log}"), *_needs(run.subjects.floor))
    return run.allow_worker_reports("recorder", *keeping, *run.lane("recorder"), *run.read())


def _build_gateway_rights(run: _RunSubjects) -> Rights:
    """Calls sessions for clients outside; sees nothing of the log but their journals, and the images that they show."""
    journals = _api(f"{run.direct}.{run.subjects.session('*')}")
    work = (*journals, *run.read(run.subjects.session("*")), *run.allow_object_reads())
    return run.allow_worker_reports("gateway", *work, calls=(run.sessions, *run.control("environment")), hears=("environment",))


def _build_operator_rights(run: _RunSubjects) -> Rights:
    """Requests, cancels, drains, pauses: `evaluate`, `cancel`, `drain`, `pause`."""
    own = (*run.stream_info, *_needs(run.subjects.task("*", "*"), run.subjects.episode("*")))
    calls = (run.sessions, *run.control(*WORKERS))
    list_subscriptions = run.heartbeats(*WORKERS)
    return Rights(asks=(*own, *run.read()), calls=calls, hears=list_subscriptions, listens=(run.subjects.heartbeats,))


def _build_monitor_rights(run: _RunSubjects) -> Rights:
    """Looks on: `monitor`, `top`, `audit`, `record`. Nothing that it may publish ends up in the log or at a worker."""
    own = (*run.stream_info, *_api(f"STREAM.INFO.{run.plan.lanes.name}"))
    calls = tuple((role, _SERVICES) for role in WORKERS)
    list_subscriptions = run.heartbeats(*WORKERS)
    return Rights(asks=(*own, *run.read()), calls=calls, hears=list_subscriptions, listens=(run.subjects.heartbeats,))


_RIGHTS = {
    "admin": _build_admin_rights,
    "operator": _build_operator_rights,
    "environment": _build_environment_rights,
    "inference": _build_inference_rights,
    "learner": _build_learner_rights,
    "recorder": _build_recorder_rights,
    "gateway": _build_gateway_rights,
    "monitor": _build_monitor_rights,
}
