"""A task's verifier as the Fleet platform takes it: source in a zip, named by its hash, arguments beside it.

The source is read, never run: the platform runs it. The same source gives the same bytes in every process, so that the platform
needs to be sent them once. Arguments are a pickle because that is what the platform loads; nothing is unpickled here.
"""

import ast
import base64
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Sequence

import msgspec

EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time stamp of files in the zip: any fixed one will do."""

RUNTIME_REQUIREMENTS = "fleet-python"
_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*\n(.*?)\n?```", re.DOTALL)


class VerifierCode(msgspec.Struct, frozen=True, kw_only=True):
    """``function`` is the first that the source defines; ``parameters`` are the names that it takes."""

    function: str
    parameters: tuple[str, ...]
    archive: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()


def read_verifier(text: str) -> VerifierCode:
    """Raises `ValueError` with one line if the text is no Python, or defines no function."""
    fenced = _FENCE.search(text)
    source = fenced[1] if fenced else text
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the verifier is not Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = tuple(argument.arg for argument in every)
            return VerifierCode(function=node.name, parameters=names, archive=_build_archive(source))
    raise ValueError("the verifier defines no function")


def build_execution_request(
    code: VerifierCode,
    *,
    key: str,
    instance_id: str,
    final_answer: str | None,
    conversation: Sequence[dict[str, object]],
    seconds: int,
    region: str,
    with_code: bool,
) -> dict[str, object]:
    """The body of ``POST /v1/verifiers/execute``. The answer and the conversation go to those functions that ask for them."""
    given: dict[str, object] = {}
    if final_answer is not None and "final_answer" in code.parameters:
        given["final_answer"] = final_answer
    if "conversation" in code.parameters:
        given["conversation"] = json.dumps(list(conversation), ensure_ascii=False)
    environment = {"env": instance_id}
    body: dict[str, object] = {
        "key": key,
        "sha256": code.sha256,
        "args": base64.b64encode(pickle.dumps({"args": (None, environment), "kwargs": given}, protocol=4)).decode(),
        "args_array": [environment],
        "function_name": code.function,
        "timeout": seconds,
        "region": region or "us-west-1",
    }
    return body | ({"bundle": base64.b64encode(code.archive).decode()} if with_code else {})


def _build_archive(source: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in (("requirements.txt", RUNTIME_REQUIREMENTS), ("verifier.py", source)):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
