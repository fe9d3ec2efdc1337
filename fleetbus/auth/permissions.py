"""The rights that each user of a run needs on the bus, and nothing else: accounts derive from this, and this from the table of
channels (docs/decisions/0161-one-table-of-channels.md). Pure.

A run has an account that holds its streams, and an account per role. JetStream's API is a set of subjects, so a need is a
subject: a role's account imports those of its needs that the run's account serves, and what other roles serve or tell. A
permission alone would not do: the server checks which subject a question goes to, not which subject its answer goes to. In an
account of its own an answer reaches nothing but what the account imports, so it does no more than the role may do anyway.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import IMPORTED_API, RunPlan, work_alias
from fleetbus_schemas import ANY_LANE
from fleetbus_schemas.channels import CHANNELS, ROLES, Channel, Use, Way, covers_log

T = TypeVar("T")

USER_OF: dict[str, str] = {
    "init": "admin",
    "restore": "admin",
    "up": "admin",
    "cancel": "operator",
    "drain": "operator",
    "pause": "operator",
    "label": "operator",
    "evaluate": "operator",
    **{user: user for user in ROLES},
}
"""Which user a role or command is; any other only reads, and is a ``monitor``."""

NARROW_READERS = frozenset(role for role in ROLES if role != "admin" and not covers_log(role, "batch"))
"""Users that read the log by consumers with a filter alone: a batched direct get names its subjects where no permission sees
them. Costs a few milliseconds where a history is rebuilt, and keeps tasks and their verifiers from them."""


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Messages on ``subject`` that the run's account takes, which maps what is below `IMPORTED_API` to JetStream; ``target`` is
    their subject there if it is another one. ``streamed``: a question with any number of answers."""

    subject: str
    target: str = ""
    streamed: bool = False


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """The operations that one user of one run may do, besides talking to itself on its inbox.

    ``asks``: of the run's account. ``calls`` and ``hears``: (role, subject) of other roles' services and broadcasts. ``serves``
    and ``tells``: its own. ``listens``: a subject with wildcards that it subscribes to in place of those that it hears, or on
    which others of its role speak.
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


def build_rights(
    user: str, plan: RunPlan, names: Mapping[str, str] | None = None, readers: Sequence[str] = (), key: str = "*"
) -> Rights:
    """The rights of ``user`` in one run: what the table of channels says that it does (`fleetbus_schemas.channels`). ``names``:
    what the durable consumers of the plan are called on the server, where they have names that cannot be guessed
    (`fleetbus.auth.consumer_names`); without, as in the plan. ``readers``: the names of all consumers that it may read the log
    by; without, any. ``key``: its public key, for subjects that are that key's alone."""
    gathered = _GatheredRights(user, plan, names or {}, readers, key)
    for channel in CHANNELS:
        for use in channel.uses:
            if use.role == user:
                gathered.add(channel, use)
    return gathered.build()


def _needs(*subjects: str) -> tuple[Need, ...]:
    return tuple(Need(subject=subject) for subject in subjects)


def _api(*questions: str, streamed: bool = False) -> tuple[Need, ...]:
    return tuple(Need(subject=f"{IMPORTED_API}.{question}", streamed=streamed) for question in questions)


class _GatheredRights:
    """The operations of one user of one run on each channel, as the subjects that this takes."""

    def __init__(self, user: str, plan: RunPlan, names: Mapping[str, str], readers: Sequence[str], key: str) -> None:
        self._user = user
        self._key = key
        self._plan = plan
        self._names = names
        self._readers = readers
        self._log = plan.log.name
        self._streams = {
            "log": plan.log.name,
            "lanes": plan.lanes.name,
            "bucket": f"OBJ_{weights_bucket(plan.run)}",
            "images": f"OBJ_{images_bucket(plan.run)}",
        }
        self._asks: list[Need] = []
        self._others: dict[str, list[tuple[str, str]]] = {"call": [], "hear": []}
        self._own: dict[str, list[str]] = {"serve": [], "tell": []}
        self._listens: list[str] = []

    def add(self, channel: Channel, use: Use) -> None:
        for way in use.ways:
            if way in ("call", "hear"):
                others = [role for role in use.of if role != self._user]
                self._others[way] += [
                    (role, channel.fill(run=self._plan.run, role=role, command=use.command)) for role in others
                ]
                if way == "hear" and len(others) > 1:
                    self._listens.append(channel.below(run=self._plan.run))
                elif way == "hear" and self._user in use.of:  # of the same account, which imports nothing from itself
                    self._listens.append(self._subject(channel))
            elif way == "serve" or (way == "send" and not channel.kept):
                self._own["serve" if way == "serve" else "tell"].append(self._subject(channel))
            elif way == "batch" or channel.kept != "log" or channel.name == "log" or not covers_log(self._user, way):
                self._asks += self._ask(channel, way)

    def build(self) -> Rights:
        return Rights(
            asks=_deduplicate(self._asks),
            calls=tuple(self._others["call"]),
            hears=tuple(self._others["hear"]),
            serves=tuple(self._own["serve"]),
            tells=tuple(self._own["tell"]),
            listens=tuple(self._listens),
            everything=self._user == "admin",
        )

    def _subject(self, channel: Channel) -> str:
        """All of the channel that is this user's own."""
        return channel.fill(run=self._plan.run, role=self._user, key=self._key)

    def _ask(self, channel: Channel, way: Way) -> tuple[Need, ...]:
        """The questions to the account with the streams, to use a channel that one of them keeps."""
        stream, subject = self._streams[channel.kept], self._subject(channel)
        match way:
            case "send" if channel.kept in ("bucket", "images"):
                return _needs(*(channel.fill(run=self._plan.run, part=part) for part in ("C", "M")))
            case "send":
                return _needs(subject)
            case "last":
                return _api(f"DIRECT.GET.{stream}.{subject}")
            case "batch":
                return self._read_directly(stream)
            case "fetch":
                return (*_api(f"STREAM.INFO.{stream}"), *self._read_directly(stream))
            case "scan":
                return self._scan(channel)
            case "work":
                return self._work()
            case "progress":
                return self._shared_progress(channel)
            case "info":
                return _api(f"STREAM.INFO.{stream}")
            case "floors":  # this tells the names of all consumers
                return _api(f"CONSUMER.LIST.{stream}")
            case "purge":
                return _api(f"STREAM.PURGE.{stream}")
            case _:
                raise AssertionError(f"{way} {channel.name}")

    def _read_directly(self, stream: str) -> tuple[Need, ...]:
        return _api(f"DIRECT.GET.{stream}", f"DIRECT.GET.{stream}.>", streamed=True)

    def _scan(self, channel: Channel) -> tuple[Need, ...]:
        """To follow and scan by own consumers. They have names that nobody can guess, as the durable ones have: who may pull
        from any consumer can pull from those alone whose name it knows."""
        every, filters = f"{self._log}.*", ["", ".>"] if channel.name == "log" else [f".{self._subject(channel)}"]
        named = [f"*{each}" for each in filters] if not self._readers else self._readers
        created = (f"CONSUMER.CREATE.{self._log}.{each}" for each in named)
        asked = _api(*created, f"CONSUMER.INFO.{every}", f"CONSUMER.DELETE.{every}")
        return (*asked, *_api(f"CONSUMER.MSG.NEXT.{every}", streamed=True))

    def _work(self) -> tuple[Need, ...]:
        """To pull from durable consumers and to ack: from those whose names it finds in its role's lanes, where no other role
        reads (`fleetbus.bus.streams.name_subject`)."""
        every = f"{self._log}.*"
        pulled = _api(f"CONSUMER.MSG.NEXT.{every}", streamed=True)
        return (*_api(f"CONSUMER.INFO.{every}"), *pulled, *_needs(f"$JS.ACK.{every}.>"))

    def _shared_progress(self, channel: Channel) -> tuple[Need, ...]:
        """To ask about the consumers that all of another role share, by names of its own account."""
        needs: list[Need] = []
        for consumer in self._plan.consumers:
            if consumer.name.startswith(channel.consumer.partition("{")[0]) and consumer.name.endswith(f"_{ANY_LANE}"):
                subject = f"{IMPORTED_API}.CONSUMER.INFO.{work_alias(self._plan.run)}.{consumer.name}"
                target = f"{IMPORTED_API}.CONSUMER.INFO.{self._log}.{self._names.get(consumer.name, consumer.name)}"
                needs.append(Need(subject=subject, target=target))
        return tuple(needs)


def _deduplicate(*parts: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(each for part in parts for each in part))
