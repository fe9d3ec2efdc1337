"""The rights of each user of a run: the subjects that it may publish to and subscribe to, as data. Pure.

Made from the run's plan, so that streams, consumers and lanes are named and not guessed. JetStream's API is a set of subjects:
who may pull from which consumer, and read which subjects of the log, is a matter of permission to publish the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fleetbus.bus.objects import weights_bucket
from fleetbus.bus.streams import RunPlan
from fleetbus_schemas import ANY_LANE, Subjects

USERS = ("admin", "operator", "environment", "inference", "learner", "recorder", "gateway", "monitor")

USER_OF: dict[str, str] = {
    "init": "admin",
    "up": "admin",
    "cancel": "operator",
    "drain": "operator",
    "evaluate": "operator",
    **{user: user for user in USERS},
}
"""Which user a role or command is; whoever is not named here only looks, and is a ``monitor``."""

NARROW_READERS = frozenset({"inference", "gateway"})
"""Users that read the log by consumers with a filter alone: a batched direct get names its subjects where no permission sees
them. Costs a few milliseconds where a history is rebuilt, and keeps tasks and their verifiers from them."""

_API = "$JS.API"
_SERVICES = "$SRV.>"


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What one user may do. ``deny`` takes away from ``publish``; ``answers``: may answer who asks it."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deny: tuple[str, ...] = ()
    answers: bool = False


def get_user(role: str) -> str:
    """The user that a role, or a command of that name, connects as."""
    return USER_OF.get(role, "monitor")


def build_inbox_prefix(user: str) -> str:
    """The prefix of the subjects on which a user gets its answers."""
    return f"_INBOX_{user}"


def build_rights(user: str, plans: Sequence[RunPlan]) -> Rights:
    """The rights of ``user`` in all of these runs."""
    each = [_RIGHTS[user](_RunSubjects(plan)) for plan in plans]
    inbox = f"{build_inbox_prefix(user)}.>"
    return Rights(
        publish=_deduplicate([inbox], *(rights.publish for rights in each)),
        subscribe=_deduplicate([inbox], *(rights.subscribe for rights in each)),
        deny=_deduplicate(*(rights.deny for rights in each)),
        answers=any(rights.answers for rights in each),
    )


def _deduplicate(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subject for part in parts for subject in part))


class _RunSubjects:
    """The subjects of one run, and what it takes to read and to pull."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.subjects = Subjects(plan.run)
        self.log = plan.log.name
        self.bucket = weights_bucket(plan.run)
        self.stream_info = f"{_API}.STREAM.INFO.{self.log}"
        self.direct = f"{_API}.DIRECT.GET.{self.log}"

    def allow_worker_reports(self, role: str, *more: str) -> list[str]:
        """What every worker says of itself."""
        return [self.stream_info, self.subjects.life(role, "*"), self.subjects.heartbeat(role, "*"), *more]

    def list_subscriptions(self, role: str, *more: str) -> tuple[str, ...]:
        """What every worker listens to."""
        return (self.subjects.control(role, "*"), _SERVICES, *more)

    def lane(self, role: str) -> list[str]:
        """To claim, renew and look up the lanes of a role."""
        subject = self.subjects.lane(role, "*")
        return [subject, f"{_API}.DIRECT.GET.{self.plan.lanes.name}.{subject}"]

    def pull(self, prefix: str) -> list[str]:
        """To take work from the durable consumers whose names begin like this, and to ack it."""
        names = self.consumers(prefix)
        pulls = [f"{_API}.CONSUMER.MSG.NEXT.{self.log}.{name}" for name in names]
        return [*pulls, *self.look_at(names), *(f"$JS.ACK.{self.log}.{name}.>" for name in names)]

    def look_at(self, consumers: Iterable[str]) -> list[str]:
        """To ask how far these durable consumers got."""
        return [f"{_API}.CONSUMER.INFO.{self.log}.{name}" for name in consumers]

    def consumers(self, prefix: str = "") -> list[str]:
        return [consumer.name for consumer in self.plan.consumers if consumer.name.startswith(prefix)]

    def read(self, *filters: str) -> list[str]:
        """To follow and scan these subjects by consumers of one's own; without any, the whole log."""
        creations = [f"{_API}.CONSUMER.CREATE.{self.log}.*.{subject}" for subject in filters]
        whole = [] if filters else [f"{_API}.CONSUMER.CREATE.{self.log}.>", self.direct, f"{self.direct}.>"]
        own = [f"{_API}.CONSUMER.{what}.{self.log}.*" for what in ("MSG.NEXT", "INFO", "DELETE")]
        return [*creations, *whole, *own]

    def allow_object_reads(self) -> list[str]:
        """To read from the run's object bucket."""
        stream = f"OBJ_{self.bucket}"
        return [f"{_API}.STREAM.INFO.{stream}", f"{_API}.DIRECT.GET.{stream}", f"{_API}.DIRECT.GET.{stream}.>"]

    def allow_object_writes(self) -> list[str]:
        """To store in it, and to clear away what was stored in part. Weights are checked against the digests in `policy.>`."""
        changes = [f"{_API}.STREAM.{what}.OBJ_{self.bucket}" for what in ("CREATE", "PURGE")]
        return [*self.allow_object_reads(), *changes, f"$O.{self.bucket}.C.*", f"$O.{self.bucket}.M.*"]

    def deny_other_consumers(self, own_prefix: str = "\0") -> tuple[str, ...]:
        """A reader's consumers have names that nobody can foresee; the durable ones of others it may neither pull from nor
        change, and its own not change."""
        denied = []
        for name in self.consumers():
            denied += [f"{_API}.CONSUMER.{what}.{self.log}.{name}" for what in ("CREATE", "DELETE")]
            denied.append(f"{_API}.CONSUMER.CREATE.{self.log}.{name}.>")
            if not name.startswith(own_prefix):
                denied.append(f"{_API}.CONSUMER.MSG.NEXT.{self.log}.{name}")
        return tuple(denied)


def _build_admin_rights(run: _RunSubjects) -> Rights:
    """Declares streams and consumers: `init`, `up`."""
    return Rights(publish=(">",), subscribe=(">",))


def _build_environment_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    said = run.allow_worker_reports(
        "environment", subjects.observation("*", "*", "*"), subjects.episode("*"), subjects.session("*")
    )
    waiting = [name for name in run.consumers("obs_") if name.endswith(f"_{ANY_LANE}")]
    asked = [subjects.control("inference", "*"), run.direct, f"{run.direct}.>", *run.look_at(waiting)]
    return Rights(
        publish=(*said, *run.lane("environment"), *run.pull("task_"), *run.pull("act_"), *asked, *run.allow_object_writes()),
        subscribe=run.list_subscriptions("environment", subjects.heartbeat("inference", "*"), subjects.rpc("*", "*")),
        answers=True,
    )


def _build_inference_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    actions = subjects.action("*", "*")
    said = run.allow_worker_reports("inference", actions, f"{run.direct}.{actions}", f"{run.direct}.{subjects.policy('*')}")
    read = run.read(subjects.policy("*"), subjects.episode("*"), actions)
    return Rights(
        publish=(*said, *run.lane("inference"), *run.pull("obs_"), *read, *run.allow_object_reads()),
        subscribe=run.list_subscriptions("inference"),
        deny=run.deny_other_consumers("obs_"),
        answers=True,
    )


def _build_learner_rights(run: _RunSubjects) -> Rights:
    subjects = run.subjects
    own = (subjects.task("*", "*"), subjects.episode("*"), subjects.policy("*"), subjects.train("*"))
    return Rights(
        publish=(*run.allow_worker_reports("learner", *own), *run.read(), *run.allow_object_writes()),
        subscribe=run.list_subscriptions("learner"),
        deny=run.deny_other_consumers(),
        answers=True,
    )


def _build_recorder_rights(run: _RunSubjects) -> Rights:
    keeping = (f"{_API}.CONSUMER.LIST.{run.log}", f"{_API}.STREAM.PURGE.{run.log}")
    return Rights(
        publish=(*run.allow_worker_reports("recorder", *keeping), *run.lane("recorder"), *run.read()),
        subscribe=run.list_subscriptions("recorder"),
        deny=run.deny_other_consumers(),
        answers=True,
    )


def _build_gateway_rights(run: _RunSubjects) -> Rights:
    """Calls sessions for clients outside; sees nothing of the log but their journals, and the images that they show."""
    subjects = run.subjects
    journals = f"{run.direct}.{subjects.session('*')}"
    said = run.allow_worker_reports("gateway", subjects.rpc("*", "*"), subjects.control("environment", "*"), journals)
    return Rights(
        publish=(*said, *run.read(subjects.session("*")), *run.allow_object_reads()),
        subscribe=run.list_subscriptions("gateway", subjects.heartbeat("environment", "*")),
        deny=run.deny_other_consumers(),
        answers=True,
    )


def _build_operator_rights(run: _RunSubjects) -> Rights:
    """Requests, cancels, drains: `evaluate`, `cancel`, `drain`."""
    subjects = run.subjects
    own = (run.stream_info, subjects.task("*", "*"), subjects.episode("*"), subjects.control("*", "*"), subjects.rpc("*", "*"))
    return Rights(publish=(*own, *run.read()), subscribe=(subjects.heartbeats,), deny=run.deny_other_consumers())


def _build_monitor_rights(run: _RunSubjects) -> Rights:
    """Looks on: `monitor`, `top`, `audit`, `record`. Nothing that it may publish ends up in the log or at a worker."""
    asked = (run.stream_info, f"{_API}.STREAM.INFO.{run.plan.lanes.name}", f"{_API}.CONSUMER.LIST.{run.log}", _SERVICES)
    return Rights(publish=(*asked, *run.read()), subscribe=(run.subjects.heartbeats,), deny=run.deny_other_consumers())


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
