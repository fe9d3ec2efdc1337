"""The same 58 operations on the bus for every user: what each may do, as a table that people read and tests carry out.

A row is one message of a client; that work is taken from a consumer is that its name is read, which nobody guesses. Whether a
user may do it follows from `fleetbus.auth.permissions` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from fleetbus.auth.permissions import Rights, build_inbox_prefix, build_rights
from fleetbus.bus.objects import images_bucket, weights_bucket
from fleetbus.bus.streams import API, IMPORTED_API, RunPlan, log_stream, name_subject, plan_run
from fleetbus_schemas import Subjects
from fleetbus_schemas.channels import ROLES

PUBLISH, ASK, CALL, TELL, LISTEN = "publish", "ask", "call", "tell", "listen"
"""Kinds: a message that a stream stores; a question to JetStream; a call to a worker; a broadcast; a subscription."""

OTHER_RUN = "other"

EPISODE = "e9"
READER = "reader-of-my-own"
OBJECT = "bmFtZQ=="


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One message: ``subject`` is that of a client whose account imports JetStream's subjects, ``on_server`` the same in the
    account that holds the streams."""

    name: str
    kind: str
    subject: str

    @property
    def on_server(self) -> str:
        return self.subject.replace(f"{IMPORTED_API}.", f"{API}.", 1).replace("fbwork_", "fb_")


def operations(run: str) -> tuple[Operation, ...]:
    """All of them, for one run."""
    subjects, log = Subjects(run), log_stream(run)
    bucket, pictures = weights_bucket(run), images_bucket(run)

    def rows() -> Iterator[tuple[str, str, str]]:
        yield "request an episode", PUBLISH, subjects.task("default", EPISODE)
        yield "claim or finish an episode", PUBLISH, subjects.episode(EPISODE)
        yield "label an episode", PUBLISH, subjects.label(EPISODE)
        yield "store an observation", PUBLISH, subjects.observation("default", "any", EPISODE)
        yield "store an action", PUBLISH, subjects.action("e0", EPISODE)
        yield "write a session's journal", PUBLISH, subjects.session(EPISODE)
        yield "write into another run", PUBLISH, Subjects(OTHER_RUN).episode(EPISODE)
        yield "publish a policy", PUBLISH, subjects.policy("default")
        yield "write into the training journal", PUBLISH, subjects.train("default")
        for role in ("environment", "inference", "learner", "recorder", "gateway"):
            yield f"say hello as {role}", PUBLISH, subjects.life(role, "w")
        for role in ("environment", "inference", "recorder"):
            yield f"take a lane of {role}", PUBLISH, subjects.lane(role, "l0")
        for consumer in ("task_default", "obs_default_any"):
            yield f"name the consumer {consumer}", PUBLISH, name_subject(run, consumer)[1]
        for what, consumer in (("tasks", "task_default"), ("observations", "obs_default_any"), ("actions", "act_e0")):
            yield f"take {what}", ASK, f"{IMPORTED_API}.DIRECT.GET.fblane_{run}.{name_subject(run, consumer)[1]}"
        yield "look at the log", ASK, f"{IMPORTED_API}.STREAM.INFO.{log}"
        yield "look at the lanes", ASK, f"{IMPORTED_API}.STREAM.INFO.fblane_{run}"
        yield "read the whole log directly", ASK, f"{IMPORTED_API}.DIRECT.GET.{log}"
        yield "read a task", ASK, f"{IMPORTED_API}.DIRECT.GET.{log}.{subjects.task('default', 'e0')}"
        yield "read an action", ASK, f"{IMPORTED_API}.DIRECT.GET.{log}.{subjects.action('e0', 'e0')}"
        yield "read a session's journal", ASK, f"{IMPORTED_API}.DIRECT.GET.{log}.{subjects.session(EPISODE)}"
        for name, followed in (("tasks", subjects.tasks()), ("episodes", subjects.episode("*")), ("all", subjects.log)):
            yield f"follow {name}", ASK, f"{IMPORTED_API}.CONSUMER.CREATE.{log}.{READER}-{name}.{followed}"
        yield "follow policies", ASK, f"{IMPORTED_API}.CONSUMER.CREATE.{log}.{READER}-policies.{subjects.policy('*')}"
        yield "list the consumers", ASK, f"{IMPORTED_API}.CONSUMER.LIST.{log}"
        yield "remove entries of the log", ASK, f"{IMPORTED_API}.STREAM.PURGE.{log}"
        yield "delete the log", ASK, f"{IMPORTED_API}.STREAM.DELETE.{log}"
        yield "change the log", ASK, f"{IMPORTED_API}.STREAM.UPDATE.{log}"
        yield "make a stream", ASK, f"{IMPORTED_API}.STREAM.CREATE.mine"
        yield "delete the object bucket", ASK, f"{IMPORTED_API}.STREAM.DELETE.OBJ_{bucket}"
        for what, place in (("weights", bucket), ("images", pictures)):
            yield f"read {what}", ASK, f"{IMPORTED_API}.DIRECT.GET.OBJ_{place}.$O.{place}.M.{OBJECT}"
            yield f"store a part of {what}", PUBLISH, f"$O.{place}.C.part"
            yield f"name {what}", PUBLISH, f"$O.{place}.M.{OBJECT}"
            yield f"remove {what}", ASK, f"{IMPORTED_API}.STREAM.PURGE.OBJ_{place}"
        yield "call a session", CALL, subjects.rpc("w", EPISODE)
        for role in ("environment", "inference", "learner"):
            yield f"ask whether {role} lives", CALL, subjects.control(role, "w", "ping")
            yield f"drain {role}", CALL, subjects.control(role, "w", "drain")
        yield "ask for services", CALL, "$SRV.PING"
        yield "beat as environment", TELL, subjects.heartbeat("environment", "w")
        yield "hear inference workers live", LISTEN, subjects.heartbeat("inference", "*")
        yield "hear learners live", LISTEN, subjects.heartbeat("learner", "*")
        yield "read the admin's mail", LISTEN, f"{build_inbox_prefix('admin')}.>"

    return tuple(Operation(name=name, kind=kind, subject=subject) for name, kind, subject in rows())


def is_allowed(rights: Rights, operation: Operation) -> bool:
    """True if a user with these rights may do it."""
    if rights.everything and operation.kind in (PUBLISH, ASK):
        return not operation.subject.startswith(Subjects(OTHER_RUN).log.removesuffix(">"))
    if operation.kind == LISTEN:
        own = (f"{build_inbox_prefix('admin')}.>",) if rights.everything else ()
        allowed: Iterable[str] = (*own, *(subject for _, subject in rights.hears), *rights.listens)
    else:  # the admin's account is not that of any worker
        allowed = () if rights.everything else rights.publish
    return any(covers(pattern, operation.subject) for pattern in allowed)


def covers(pattern: str, subject: str) -> bool:
    """True if a subject with wildcards covers another one, which may have wildcards as well."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">" or (token != given[index] and token != "*"):
            return False
    return len(wanted) == len(given)


def table(users: Sequence[str] = ROLES) -> str:
    """Who may do what, as it stands in ``docs/accounts.md``; of the run ``default``."""
    plan: RunPlan = plan_run("default")
    rights = {user: build_rights(user, plan) for user in users}
    lines = [f"| operation | {' | '.join(users)} |", f"|---|{'---|' * len(users)}"]
    for operation in operations("default"):
        marks = ["yes" if is_allowed(rights[user], operation) else "" for user in users]
        lines.append(f"| {operation.name} | {' | '.join(marks)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
