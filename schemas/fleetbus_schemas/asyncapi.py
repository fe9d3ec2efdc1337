"""The contract as an AsyncAPI 3 document, for programs in other languages: who sends which message on which NATS subject.

Addresses and roles come from `fleetbus_schemas.channels`, payloads from the message types. On the wire a payload is msgpack:
what a schema here calls a base64 string is a msgpack ``bin``, everything else is as in JSON.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from fleetbus_schemas import MESSAGES, Message
from fleetbus_schemas.channels import CHANNELS, Channel

VERSION = "3.0.0"
CONTENT_TYPE = "application/msgpack"

_KEPT = {
    "log": "Stored in the log.",
    "lanes": "Stored in a stream beside the log.",
    "bucket": "Stored in a bucket beside the log.",
    "": "A core message, not stored.",
}


def list_channels() -> tuple[Channel, ...]:
    """Every channel that messages travel on, in the order of an episode's life."""
    return tuple(channel for channel in CHANNELS if channel.messages)


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
    return {
        "address": channel.address,
        "description": f"{channel.about} {_KEPT[channel.kept]}",
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
