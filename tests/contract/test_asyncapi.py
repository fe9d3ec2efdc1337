"""`fleetbus schema --asyncapi` says where every message travels, and AsyncAPI's own parser takes it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbus_schemas import MESSAGES, Message, Subjects
from fleetbus_schemas.asyncapi import build_asyncapi, list_channels

EXAMPLES: dict[type[Message], Message] = runpy.run_path(str(Path(__file__).with_name("examples.py")))["EXAMPLES"]

PARSE = """
const { Parser } = require('@asyncapi/parser');
const { readFileSync } = require('fs');
new Parser().parse(readFileSync(process.argv[2], 'utf8')).then(({ document, diagnostics }) => {
  const errors = diagnostics.filter(each => each.severity === 0).map(each => `${each.path.join('.')}: ${each.message}`);
  console.log(JSON.stringify({ valid: !!document, errors, operations: document ? document.operations().length : 0 }));
});
"""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_asyncapi()


def test_every_message_travels_somewhere(document: dict[str, Any]) -> None:
    travelling = {name for channel in document["channels"].values() for name in channel["messages"]}
    assert travelling == {kind.__name__ for kind in MESSAGES}


def test_every_subject_has_its_channel() -> None:
    """Whoever adds a subject to `Subjects` adds its channel."""
    names = {
        channel.address.split(".{run}.")[0] + "." + channel.address.split(".{run}.")[1].split(".")[0]
        for channel in list_channels()
    }
    assert names == {
        "fb.task", "fb.episode", "fb.obs", "fb.act", "fb.policy", "fb.train", "fb.life", "fb.session", "fb.floor", "fb.label",
        "fb.operation",
        "fbwt.{policy}", "fbrpc.{worker}", "fblane.{role}", "fbhb.{role}", "fbctl.{role}",
    }  # fmt: skip
    spelled = [name for name in vars(Subjects) if not name.startswith("_") and not isinstance(vars(Subjects)[name], property)]
    literal = {
        name for name in spelled if name not in ("tasks", "observations", "actions", "consumer_name")
    }  # wildcards, and bytes
    assert len(literal | {"floor"}) == len(list_channels())  # of properties only this one is a single subject


def test_all_references_lead_somewhere(document: dict[str, Any]) -> None:
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        place: Any = document
        for part in reference.split("/"):
            place = place[part]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_payload_schemas_take_the_examples_and_refuse_other_types(kind: type[Message], document: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": document["components"]}
    validator = jsonschema.Draft7Validator(schema)
    example = json.loads(msgspec.json.encode(EXAMPLES[kind]))
    assert [error.message for error in validator.iter_errors(example)] == []
    assert not validator.is_valid(example | {"type": "Nothing"})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_asyncapis_own_parser_takes_it_and_refuses_a_broken_one(document: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "@asyncapi/parser@3"]
    if subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=300).returncode:
        pytest.skip("@asyncapi/parser cannot be installed from here")
    (tmp_path / "parse.cjs").write_text(PARSE)

    def parsed(content: dict[str, Any]) -> dict[str, Any]:
        file = tmp_path / "asyncapi.json"
        file.write_text(json.dumps(content))
        done = subprocess.run(["node", "parse.cjs", str(file)], cwd=tmp_path, capture_output=True, timeout=60, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert parsed(document) == {"valid": True, "errors": [], "operations": len(document["operations"])}
    broken = json.loads(json.dumps(document))
    broken["operations"]["learner_send_requests"]["action"] = "shout"
    assert not parsed(broken)["valid"]
