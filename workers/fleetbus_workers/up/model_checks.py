"""Checks a model folder by its files alone, before anything starts and within 3 s: no torch, no transformers imported.

Above it is `fleetbus_workers.up.checks`. Raises `UserError`; what is found only when the model runs is the engine's to say.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError

SCAN_SECONDS = 1.5
"""Weights are searched for NaN and infinities for so long; a large model is searched in part."""

MAX_HEADER_BYTES = 100 << 20
_CHUNK_BYTES = 16 << 20
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""By data type: how its bytes are read, and the exponent that only NaN and infinities have."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_RECURRENT = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"})
"""Models without attention keep a state that cannot be batched by slots."""


def check_model_contents(folder: Path, *, engine: str = "torch") -> None:
    """Configuration, tokenizer, chat template and weights of a folder that has all of these files."""
    config = _read_object(folder / "config.json")
    check_model_type(folder, config, engine)
    _read_object(folder / "tokenizer.json")
    check_chat_template(folder)
    shapes: dict[str, tuple[str, list[int]]] = {}
    for file in find_weight_files(folder):
        shapes |= {name: (kind, shape) for name, kind, shape, _, _ in read_header(file)}
    check_vocabulary(folder, config, shapes)
    check_finite(folder)


def check_model_type(folder: Path, config: Mapping[str, object], engine: str) -> None:
    """An architecture that the installed transformers knows, with a causal language model."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UserError(f"{folder}: config.json names no model_type")
    if config.get("auto_map"):
        return  # it brings code of its own, whose names are unknown here
    known = _read_transformers("auto_mappings.py", "configuration_auto.py")
    if known and f'("{kind}",' not in known:
        raise UserError(f"{folder}: the installed transformers knows no model_type {kind!r}: upgrade transformers")
    if kind in _RECURRENT and engine == "torch":
        raise UserError(f"{folder}: {kind} has no attention whose keys and values engine torch could batch: use another engine")


def check_chat_template(folder: Path) -> None:
    """A chat template that compiles and renders a short conversation."""
    template = find_chat_template(folder)
    if template is None:
        raise UserError(f"{folder}: the tokenizer has no chat template; add one as chat_template.jinja")
    if importlib.util.find_spec("jinja2") is None:
        return
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _build_generation_extension(jinja2)]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, indent=options.get("indent"))
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    conversation = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "?"},
    ]
    tokens = {name: str(value) for name, value in _read_special_tokens(folder).items()}
    try:
        environment.from_string(template).render(messages=conversation, add_generation_prompt=True, tools=None, **tokens)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{folder}: the chat template is broken in line {error.lineno}: {error.message}") from error
    except Exception as error:  # a template is a model's own code, and may fail in any way
        raise UserError(f"{folder}: the chat template does not render: {type(error).__name__}: {error}") from error


def find_chat_template(folder: Path) -> str | None:
    """The template's text, from the places where tokenizers keep it."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found = _read_object(folder / name).get("chat_template")
            if isinstance(found, list):  # several by name
                named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
                found = named.get("default") or next(iter(named.values()), None)
            if isinstance(found, str):
                return found
    return None


def find_weight_files(folder: Path) -> list[Path]:
    """The weights files; raises `UserError` if the index names one that is not there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(_read_object(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks weights that its index names: {', '.join(missing[:3])}{' …' if missing[3:] else ''}")
    return [folder / name for name in names]


def read_header(file: Path) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Name, data type, shape, and the bytes from and to, of every tensor in a safetensors file that is whole."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header = json.loads(opened.read(length))
        tensors = [(name, data) for name, data in header.items() if name != "__metadata__"]
        found = [
            (name, data["dtype"], data["shape"], *(8 + length + at for at in data["data_offsets"])) for name, data in tensors
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no safetensors file, or a part of one: {error}") from error
    end = max((stop for *_, stop in found), default=0)
    if end > size:
        raise UserError(f"{file} is cut short: it has {size:,} of {end:,} bytes; download it again")
    yield from found


def check_vocabulary(folder: Path, config: Mapping[str, object], shapes: Mapping[str, tuple[str, list[int]]]) -> None:
    """As many embeddings as the configuration says that there are tokens."""
    nested = config.get("text_config")
    size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    for name, (_, shape) in shapes.items():
        if name.endswith(_EMBEDDINGS) and isinstance(size, int) and shape and shape[0] != size:
            raise UserError(f"{folder}: config.json has vocab_size {size}, and the weights have {shape[0]} embeddings ({name})")


def check_finite(folder: Path) -> None:
    """No NaN and no infinity in the weights, as far as they can be read in `SCAN_SECONDS`."""
    if importlib.util.find_spec("numpy") is None:
        return
    import numpy

    deadline = time.monotonic() + SCAN_SECONDS
    for file in find_weight_files(folder):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for name, kind, _, start, stop in read_header(file):
                if kind not in _EXPONENTS:
                    continue
                dtype, exponent = _EXPONENTS[kind]
                for at in range(start, stop, _CHUNK_BYTES):
                    bits = numpy.frombuffer(content[at : min(at + _CHUNK_BYTES, stop)], dtype)
                    if bool(((bits & exponent) == exponent).any()):
                        raise UserError(f"{file}: {name} holds NaN or infinite weights")
                    if time.monotonic() > deadline:
                        return


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object")
    return content


def _read_special_tokens(folder: Path) -> dict[str, str]:
    file = folder / "tokenizer_config.json"
    found = _read_object(file) if file.is_file() else {}
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in named.items() if re.fullmatch(r"[a-z]+_token", name) and isinstance(value, str)}


def _read_transformers(*names: str) -> str:
    """The text of transformers' tables of models, found without importing it; empty if it is not there."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return ""
    files = [Path(next(iter(spec.submodule_search_locations))) / "models" / "auto" / name for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def _build_generation_extension(jinja2: Any) -> object:
    """The block ``{% generation %}`` of transformers' templates, which marks what an assistant says."""

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> object:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line) if hasattr(jinja2.nodes, "Scope") else body

    return Generation
