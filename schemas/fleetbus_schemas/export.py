"""The contract as one JSON Schema document, for people and for programs in other languages.

On the wire the messages are msgpack, not JSON: what the schema calls a base64 string is a msgpack ``bin`` there. Everything
else is the same. Nothing in fleetbus validates with this document; `fleetbus_schemas.message.decode` does.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from fleetbus_schemas import MESSAGES

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def build_json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of every message: ``$defs`` by class name, ``oneOf`` the types in `MESSAGES`.

    Each description is the docstring of its class. The result is new with every call and plain JSON: no tuples.
    """
    references, definitions = msgspec.json.schema_components(MESSAGES)
    for definition in definitions.values():
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    _name_positions(definitions)
    document = {
        "$schema": DIALECT,
        "title": "fleetbus messages",
        "description": "Every message that travels between fleetbus workers (msgpack on the wire; bytes are bin, not base64).",
        "oneOf": list(references),
        "$defs": definitions,
    }
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(document))
    return plain


def _name_positions(definitions: dict[str, Any]) -> None:
    """Structs that travel as arrays have no keys: give their positions the field names as titles."""
    for kind in msgspec.inspect.multi_type_info(MESSAGES):
        for struct in _structs_in(kind):
            if struct.array_like:
                for item, field in zip(definitions[struct.cls.__name__]["prefixItems"], struct.fields, strict=True):
                    item["title"] = field.name


def _structs_in(kind: msgspec.inspect.Type) -> list[msgspec.inspect.StructType]:
    """Every struct that ``kind`` is made of, itself included, outermost first, without repeats."""
    found: list[msgspec.inspect.StructType] = []
    waiting = [kind]
    while waiting:
        match waiting.pop(0):
            case msgspec.inspect.StructType() as struct if struct not in found:
                found.append(struct)
                waiting += [field.type for field in struct.fields]
            case msgspec.inspect.UnionType(types=types):
                waiting += types
            case msgspec.inspect.VarTupleType(item_type=item):
                waiting.append(item)
    return found
