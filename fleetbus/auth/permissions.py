"""The rights of each user of a run: the subjects that it may publish to and subscribe to, as data. Pure.

Made from the run's plan, so that streams, consumers and lanes are named and not guessed. JetStream's API is a set of subjects:
who may pull from which consumer, and read which subjects of the log, is a matter of permission to publish the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fleetbus.bus.objects import weights_bucket
from fleetbus.bus.streams import RunPlan
from fleetbus_schemas import Subjects

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


def user_of(role: str) -> str:
    """The user that a role, or a command of that name, connects as."""
    return USER_OF.get(role, "monitor")


def inbox_of(user: str) -> str:
    """The prefix of the subjects on which a user gets its answers."""
    return f"_INBOX_{user}"


def rights_of(user: str, plans: Sequence[RunPlan]) -> Rights:
    """The rights of ``user`` in all of these runs."""
    each = [_RIGHTS[user](_Run(plan)) for plan in plans]
    inbox = f"{inbox_of(user)}.>"
    return Rights(
        publish=_distinct([inbox], *(rights.publish for rights in each)),
        subscribe=_distinct([inbox], *(rights.subscribe for rights in each)),
        deny=_distinct(*(rights.deny for rights in each)),
        answers=any(rights.answers for rights in each),
    )


def _distinct(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subject for part in parts for subject in part))


class _Run:
    """The subjects of one run, and what it takes to read and to pull."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.subjects = Subjects(plan.run)
        self.log = plan.log.name
        self.bucket = weights_bucket(plan.run)
        self.look = f"{_API}.STREAM.INFO.{self.log}"
        self.direct = f"{_API}.DIRECT.GET.{self.log}"

    def worker(self, role: str, *more: str) -> list[str]:
        """What every worker says of itself."""
        return [self.look, self.subjects.life(role, "*"), self.subjects.heartbeat(role, "*"), *more]

    def heard(self, role: str, *more: str) -> tuple[str, ...]:
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
        looks = [f"{_API}.CONSUMER.INFO.{self.log}.{name}" for name in names]
        return [*pulls, *looks, *(f"$JS.ACK.{self.log}.{name}.>" for name in names)]

    def consumers(self, prefix: str = "") -> list[str]:
        return [consumer.name for consumer in self.plan.consumers if consumer.name.startswith(prefix)]

    def read(self, *filters: str) -> list[str]:
        """To follow and scan these subjects by consumers of one's own; without any, the whole log."""
        creations = [f"{_API}.CONSUMER.CREATE.{self.log}.*.{subject}" for subject in filters]
        whole = [] if filters else [f"{_API}.CONSUMER.CREATE.{self.log}.>", self.direct, f"{self.direct}.>"]
        own = [f"{_API}.CONSUMER.{what}.{self.log}.*" for what in ("MSG.NEXT", "INFO", "DELETE")]
        return [*creations, *whole, *own]

    def take_objects(self) -> list[str]:
        """To read from the run's object bucket."""
        stream = f"OBJ_{self.bucket}"
        return [f"{_API}.STREAM.INFO.{stream}", f"{_API}.DIRECT.GET.{stream}", f"{_API}.DIRECT.GET.{stream}.>"]

    def keep_objects(self) -> list[str]:
        """To store in it, and to clear away what was stored in part. Weights are checked against the digests in `policy.>`."""
        changes = [f"{_API}.STREAM.{what}.OBJ_{self.bucket}" for what in ("CREATE", "PURGE")]
        return [*self.take_objects(), *changes, f"$O.{self.bucket}.C.*", f"$O.{self.bucket}.M.*"]

    def not_of_others(self, own_prefix: str = "\0") -> tuple[str, ...]:
        """A reader's consumers have names that nobody can foresee; the durable ones of others it may neither pull from nor
        change, and its own not change."""
        denied = []
        for name in self.consumers():
            denied += [f"{_API}.CONSUMER.{what}.{self.log}.{name}" for what in ("CREATE", "DELETE")]
            denied.append(f"{_API}.CONSUMER.CREATE.{self.log}.{name}.>")
            if not name.startswith(own_prefix):
                denied.append(f"{_API}.CONSUMER.MSG.NEXT.{self.log}.{name}")
        return tuple(denied)


def _admin(run: _Run) -> Rights:
    """Declares streams and consumers: `init`, `up`."""
    return Rights(publish=(">",), subscribe=(">",))


def _environment(run: _Run) -> Rights:
    subjects = run.subjects
    said = run.worker("environment", subjects.observation("*", "*", "*"), subjects.episode("*"), subjects.session("*"))
    asked = [subjects.control("inference", "*"), run.direct, f"{run.direct}.>"]
    return Rights(
        publish=(*said, *run.lane("environment"), *run.pull("task_"), *run.pull("act_"), *asked, *run.keep_objects()),
        subscribe=run.heard("environment", subjects.heartbeat("inference", "*"), subjects.rpc("*", "*")),
        answers=True,
    )


def _inference(run: _Run) -> Rights:
    subjects = run.subjects
    actions = subjects.action("*", "*")
    said = run.worker("inference", actions, f"{run.direct}.{actions}", f"{run.direct}.{subjects.policy('*')}")
    read = run.read(subjects.policy("*"), subjects.episode("*"), actions)
    return Rights(
        publish=(*said, *run.lane("inference"), *run.pull("obs_"), *read, *run.take_objects()),
        subscribe=run.heard("inference"),
        deny=run.not_of_others("obs_"),
        answers=True,
    )


def _learner(run: _Run) -> Rights:
    subjects = run.subjects
    own = (subjects.task("*", "*"), subjects.episode("*"), subjects.policy("*"), subjects.train("*"))
    return Rights(
        publish=(*run.worker("learner", *own), *run.read(), *run.keep_objects()),
        subscribe=run.heard("learner"),
        deny=run.not_of_others(),
        answers=True,
    )


def _recorder(run: _Run) -> Rights:
    keeping = (f"{_API}.CONSUMER.LIST.{run.log}", f"{_API}.STREAM.PURGE.{run.log}")
    return Rights(
        publish=(*run.worker("recorder", *keeping), *run.lane("recorder"), *run.read()),
        subscribe=run.heard("recorder"),
        deny=run.not_of_others(),
        answers=True,
    )


def _gateway(run: _Run) -> Rights:
    """Calls sessions for clients outside; sees nothing of the log but their journals, and the images that they show."""
    subjects = run.subjects
    journals = f"{run.direct}.{subjects.session('*')}"
    said = run.worker("gateway", subjects.rpc("*", "*"), subjects.control("environment", "*"), journals)
    return Rights(
        publish=(*said, *run.read(subjects.session("*")), *run.take_objects()),
        subscribe=run.heard("gateway", subjects.heartbeat("environment", "*")),
        deny=run.not_of_others(),
        answers=True,
    )


def _operator(run: _Run) -> Rights:
    """Requests, cancels, drains: `evaluate`, `cancel`, `drain`."""
    subjects = run.subjects
    own = (run.look, subjects.task("*", "*"), subjects.episode("*"), subjects.control("*", "*"), subjects.rpc("*", "*"))
    return Rights(publish=(*own, *run.read()), subscribe=(subjects.heartbeats,), deny=run.not_of_others())


def _monitor(run: _Run) -> Rights:
    """Looks on: `monitor`, `top`, `audit`, `record`. Nothing that it may publish ends up in the log or at a worker."""
    asked = (run.look, f"{_API}.STREAM.INFO.{run.plan.lanes.name}", f"{_API}.CONSUMER.LIST.{run.log}", _SERVICES)
    return Rights(publish=(*asked, *run.read()), subscribe=(run.subjects.heartbeats,), deny=run.not_of_others())


_RIGHTS = {
    "admin": _admin,
    "operator": _operator,
    "environment": _environment,
    "inference": _inference,
    "learner": _learner,
    "recorder": _recorder,
    "gateway": _gateway,
    "monitor": _monitor,
}
