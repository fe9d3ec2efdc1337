"""The contract as an AsyncAPI 3 document, for programs in other languages: who sends which message on which NATS subject.

Addresses come from `fleetbus_schemas.subjects`, payloads from the message types. On the wire a payload is msgpack: what a
schema here calls a base64 string is a msgpack ``bin``, everything else is as in JSON.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from fleetbus_schemas import (
    MESSAGES,
    ControlAnswered,
    ControlRequested,
    Heartbeat,
    LaneLease,
    Message,
    SessionAnswer,
    SessionCall,
    Subjects,
)
from fleetbus_schemas.stored import STORED

VERSION = "3.0.0"
CONTENT_TYPE = "application/msgpack"
_RUN = "RUN"

_WORKERS = ("environment", "inference", "learner", "recorder", "gateway")


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One subject with its parameters in braces. ``stored``: captured by the log; ``answers``: sent to the reply subject."""

    name: str
    address: str
    about: str
    messages: tuple[type[Message], ...]
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    stored: bool = True
    answers: tuple[type[Message], ...] = ()


def list_channels() -> tuple[Channel, ...]:
    """Every subject, in the order of an episode's life."""
    subjects = Subjects(_RUN)
    templates = (
        Channel(
            name="requests",
            address=subjects.task("{pool}", "{episode}"),
            about="Episodes asked for. Expects sequence 0 on its subject; shared by the durable consumer task_{pool}.",
            messages=STORED["task"],
            senders=("learner", "client"),
            receivers=("environment",),
        ),
        Channel(
            name="episodes",
            address=subjects.episode("{episode}"),
            about="Claims, releases and the one result of an episode; each expects the last entry that its author read.",
            messages=STORED["episode"],
            senders=("environment", "learner"),
            receivers=("learner", "client"),
        ),
        Channel(
            name="observations",
            address=subjects.observation("{policy}", "{lane}", "{episode}"),
            about="What the environment saw; lane is `any` or an inference worker's. Durable consumers obs_{policy}_{lane}.",
            messages=STORED["obs"],
            senders=("environment",),
            receivers=("inference",),
        ),
        Channel(
            name="actions",
            address=subjects.action("{lane}", "{episode}"),
            about="What the policy did, on the environment's lane. Expects the sequence that its Observation carries.",
            messages=STORED["act"],
            senders=("inference",),
            receivers=("environment", "learner"),
        ),
        Channel(
            name="policies",
            address=subjects.policy("{policy}"),
            about="Versions of the policy, and the lineages that fence them. Expects the last entry.",
            messages=STORED["policy"],
            senders=("learner",),
            receivers=("inference",),
        ),
        Channel(
            name="training",
            address=subjects.train("{policy}"),
            about="The learner's journal. Expects the last entry: a learner that is refused has been replaced.",
            messages=STORED["train"],
            senders=("learner",),
            receivers=("learner", "monitor"),
        ),
        Channel(
            name="life",
            address=subjects.life("{role}", "{worker}"),
            about="Workers come, drain, go, fail.",
            messages=STORED["life"],
            senders=_WORKERS,
            receivers=("monitor",),
        ),
        Channel(
            name="floor",
            address=subjects.floor,
            about="What has left the log for good. Expects the last entry.",
            messages=STORED["floor"],
            senders=("recorder",),
            receivers=("environment", "learner"),
        ),
        Channel(
            name="sessions",
            address=subjects.session("{session}"),
            about="The journal of a step-wise session.",
            messages=STORED["session"],
            senders=("environment",),
            receivers=("environment",),
        ),
        Channel(
            name="sessionCalls",
            address=subjects.rpc("{worker}", "{session}"),
            about="Calls into a step-wise session, answered on the reply subject.",
            messages=(SessionCall,),
            senders=("gateway",),
            receivers=("environment",),
            stored=False,
            answers=(SessionAnswer,),
        ),
        Channel(
            name="lanes",
            address=subjects.lane("{role}", "{lane}"),
            about="Who holds a lane; the last entry counts, by compare-and-set, in a stream of its own.",
            messages=(LaneLease,),
            senders=("environment", "inference", "recorder"),
            receivers=("environment", "inference", "recorder"),
        ),
        Channel(
            name="heartbeats",
            address=subjects.heartbeat("{role}", "{worker}"),
            about="How a worker is, every two seconds; a core message, not stored.",
            messages=(Heartbeat,),
            senders=_WORKERS,
            receivers=("environment", "monitor"),
            stored=False,
        ),
        Channel(
            name="control",
            address=subjects.control("{role}", "{worker}"),
            about="Drain, cancel, ping, to one worker or to `all` of a role; answered on the reply subject.",
            messages=(ControlRequested,),
            senders=("operator", "environment"),
            receivers=_WORKERS,
            stored=False,
            answers=(ControlAnswered,),
        ),
    )
    return tuple(
        msgspec.structs.replace(channel, address=channel.address.replace(f".{_RUN}.", ".{run}.", 1)) for channel in templates
    )


def build_asyncapi() -> dict[str, object]:
    """The document, new with every call and plain JSON."""
    found = list_channels()
    components: dict[str, object] = {
        "schemas": _build_schemas(),
        "messages": {kind.__name__: _build_message(kind) for kind in MESSAGES},
    }
    replies = {f"{channel.name}Answers": _build_reply_channel(channel) for channel in found if channel.answers}
    document = {
        "asyncapi": VERSION,
        "info": {
            "title": "fleetbus",
            "version": "1",
            "description": "Messages of a fleetbus run over NATS. Captured subjects form one stream per run, fb_{run}; "
            "payloads are msgpack maps with the class name under `type`; unknown fields are to be ignored.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {
            "nats": {"host": "localhost:4222", "protocol": "nats", "description": "nats-server 2.11 or newer, JetStream"}
        },
        "channels": {channel.name: _build_channel(channel) for channel in found} | replies,
        "operations": {name: operation for channel in found for name, operation in _build_operations(channel).items()},
        "components": components,
    }
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(document))
    return plain


def _build_channel(channel: Channel) -> dict[str, object]:
    kept = "Stored in the log." if channel.stored else "A core message, not stored."
    return {
        "address": channel.address,
        "description": f"{channel.about} {kept}",
        "parameters": {name: {} for name in _parse_parameters(channel.address)},
        "messages": {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in channel.messages},
    }


def _build_reply_channel(channel: Channel) -> dict[str, object]:
    """Answers go to the reply subject of the question."""
    return {
        "address": None,
        "description": f"Answers to {channel.name}, on the reply subject of the question.",
        "messages": {kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"} for kind in channel.answers},
    }


def _build_operations(channel: Channel) -> dict[str, object]:
    operations: dict[str, object] = {}
    for action, roles in (("send", channel.senders), ("receive", channel.receivers)):
        for role in roles:
            operation: dict[str, object] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{channel.name}"},
                "summary": f"{role}: {action} {', '.join(kind.__name__ for kind in channel.messages)}",
                "tags": [{"name": role}],
            }
            if channel.answers:
                operation["reply"] = {
                    "address": {"location": "$message.header#/reply"},
                    "channel": {"$ref": f"#/channels/{channel.name}Answers"},
                }
            operations[f"{role}_{action}_{channel.name}"] = operation
    return operations


def _build_message(kind: type[Message]) -> dict[str, object]:
    return {
        "name": kind.__name__,
        "contentType": CONTENT_TYPE,
        "summary": inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0],
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _build_schemas() -> dict[str, object]:
    """As `fleetbus_schemas.export`, in the dialect of AsyncAPI, which writes tuples as draft 7 does."""
    _, definitions = msgspec.json.schema_components(MESSAGES, ref_template="#/components/schemas/{name}")
    for definition in definitions.values():
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    dialect: dict[str, Any] = _convert_to_draft_7(definitions)
    return dialect


def _convert_to_draft_7(value: object) -> Any:
    if isinstance(value, dict):
        plain = {key: _convert_to_draft_7(item) for key, item in value.items()}
        if "prefixItems" in plain:
            plain["additionalItems"], plain["items"] = plain.pop("items", True), plain.pop("prefixItems")
        if isinstance(plain.get("discriminator"), dict):  # OpenAPI's; AsyncAPI knows the name of a property alone
            plain["discriminator"] = plain["discriminator"]["propertyName"]
        return plain
    return [_convert_to_draft_7(item) for item in value] if isinstance(value, list | tuple) else value


def _parse_parameters(address: str) -> list[str]:
    return [token[1:-1] for token in address.split(".") if token.startswith("{")]
