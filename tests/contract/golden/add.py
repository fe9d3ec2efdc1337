"""Add what is missing here: the bytes of each message's example, and the defaults that the wire relies on. `just golden`.

0.3.0 is the first release whose recordings and logs stay readable, and `<Name>.bin` the shape that a message has in it. From
then on nothing that exists is changed or removed: old bytes have to decode for ever. When a message has gained a field and its
example fills it, the new shape is added as `<Name>.2.bin`, and so on.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetbus_schemas import Message, encode
from fleetbus_schemas.export import build_json_schema

HERE = Path(__file__).parent


def stored(folder: Path, name: str) -> list[Path]:
    """Golden files of one message, oldest shape first."""
    numbered = {1: folder / f"{name}.bin"} | {int(file.name.split(".")[1]): file for file in folder.glob(f"{name}.*.bin")}
    return [numbered[number] for number in sorted(numbered) if numbered[number].exists()]


def defaults() -> dict[str, Any]:
    """Default of every field that has one, by ``Struct.field``: a field that is not on the wire means this value."""
    return {
        f"{struct}.{name}": field["default"]
        for struct, definition in build_json_schema()["$defs"].items()
        for name, field in definition.get("properties", {}).items()
        if "default" in field
    }


def add_missing(examples: Mapping[type[Message], Message], folder: Path) -> list[str]:
    """Write what is missing in ``folder`` and return the names of the files that were added or extended."""
    written = []
    for message_type, example in examples.items():
        files = stored(folder, message_type.__name__)
        payload = encode(example)
        if not files or files[-1].read_bytes() != payload:
            number = "" if not files else f".{len(files) + 1}"
            file = folder / f"{message_type.__name__}{number}.bin"
            with file.open("xb") as target:
                target.write(payload)
            written.append(file.name)
    known_file = folder / "defaults.json"
    known = json.loads(known_file.read_text()) if known_file.exists() else {}
    if defaults().keys() - known.keys():
        known_file.write_text(json.dumps(defaults() | known, indent=1, sort_keys=True) + "\n")
        written.append(known_file.name)
    return written


if __name__ == "__main__":
    examples = runpy.run_path(str(HERE.with_name("examples.py")))["EXAMPLES"]
    sys.stdout.writelines(f"added {name}\n" for name in add_missing(examples, HERE) or ["nothing: all there"])
