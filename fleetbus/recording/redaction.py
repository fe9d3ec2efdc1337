"""Secrets taken out of what is exported: values of secret keys, credentials in URLs, well-known key formats, known values.

Text alone would not do: token ids spell the text that they came from. So where a text of a turn lost a secret, the ids of that
turn are wiped too (as many zeros), and the turn can no longer be replayed against an engine. Pure but for what it remembers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.config.load import strip_credentials
from fleetbus.logs.secret_formats import FORMAT, REDACTED, redact_formats
from fleetbus.logs.setup import SECRET_WORDS
from fleetbus_schemas.message import UNREADABLE

SHORTEST_KNOWN_SECRET = 8
"""Shorter values of secret keys are not searched for elsewhere: they would hit innocent text."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^\s/@\"'<>]+@[^\s\"'<>]+")
_WORDS = "|".join(word.replace("_", "[_-]?") for word in SECRET_WORDS if word not in ("seed", "credential"))
_ASSIGNED = re.compile(
    rf"(?i)((?:{_WORDS}|access[_-]?token|auth[_-]?token)[\w-]{{0,64}}[\"']?\s*[:=]\s*[\"']?)([^\s\"',;}}\]]{{4,}})"
)
_MARKS = b"""
    api authorization cookie credential passw private secret :// sk- hf_ akia asia a3t abia acca xox xapp- eyj aiza ya29. 1//0
    gocspx- ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ gr1348941 npm_ pypi- hooks.slack rk_ whsec_ sg. dapi _v1_ dckr_ hvs. hvb. hvr.
    .atlasv1. pul- pscale_ lin_ ntn_ glc_ glsa_ nrak- nrii- nrjs- sntr shp gsk_ xai- pplx- nvapi- r8_ fw_ age-secret :aa
"""


def _join_by_prefix(words: Iterable[bytes]) -> bytes:
    """The expression that finds any of the words, each common letter tried once: half the time of plain alternatives."""
    rests: dict[bytes, list[bytes]] = {}
    for word in sorted(words):
        rests.setdefault(word[:1], []).append(word[1:])
    return b"|".join(
        re.escape(first + rest[0]) if len(rest) == 1 else re.escape(first) + b"(?:" + _join_by_prefix(rest) + b")"
        for first, rest in rests.items()
    )


_SUSPICIOUS = (
    re.compile(_join_by_prefix([*_MARKS.split(), b"bearer ", b"basic "])),
    re.compile(rb"gl(?:pat|ptt|rt|cbt|dt|soat|oas|ft|imt|agent|ffct)[a-z0-9_=.-]{20}"),
    re.compile(rb"sk_(?<!\wsk_)"),
    re.compile(rb"sk[0-9a-f]{32}"),
    re.compile(rb"s[a-z2-7]{57}"),
    *(re.compile(word + rb"[a-z0-9_-]{0,16}[\xa0-\xbf\xd9-\xdb]") for word in (b"seed", b"token")),
)
"""A payload needs a closer look if, in lower case, one of these is found in it; the last two are keys that name a seed or a
token, before the first byte of a msgpack text. Expressions that begin with fixed letters are searched for ten times as fast."""

_TOKEN_FIELDS = ("prompt_delta", "sampled", "logprobs")


class Redactor:
    """Takes secrets out of entries, in the order of the log. ``redacted`` counts the entries that lost something.

    ``known`` are values that are secret wherever they stand; values found under secret keys are added to them.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = {value for value in known if len(value) >= SHORTEST_KNOWN_SECRET}
        self._known_bytes = _compile_alternatives(self._known)
        self._wiped: set[tuple[str, str]] = set()
        self.redacted = 0

    def clean(self, entry: StreamEntry) -> StreamEntry:
        """The entry without secrets; the same object if there were none."""
        payload = entry.payload
        is_action_after = bool(self._wiped) and b"prompt_delta" in payload
        if not is_action_after and not self._is_suspicious(payload):
            return entry
        try:
            content = msgspec.msgpack.decode(payload)
            if not isinstance(content, dict):
                return self._replace_unreadable(entry)
            cleaned = self._clean_message(content)
            if cleaned == content:
                return entry
            written = msgspec.msgpack.encode(cleaned)
        except UNREADABLE:  # also values in values that decode, and are too deep for us
            return self._replace_unreadable(entry)
        self.redacted += 1
        return msgspec.structs.replace(entry, payload=written)

    def finds_secret(self, content: bytes) -> bool:
        """True if a secret can be read in a file's bytes. Compressed content and pixels are not inspected."""
        text = content.decode("latin-1")
        if any(value in text for value in self._known) or FORMAT.search(text):
            return True
        return _is_text(content) and self.clean_text(content.decode()) != content.decode()

    def clean_text(self, text: str) -> str:
        """One text without secrets."""
        for value in self._known:
            if value in text:
                text = text.replace(value, REDACTED)
        text = redact_formats(text)
        text = _URL.sub(lambda found: strip_credentials(found.group()), text)
        return _ASSIGNED.sub(_redact_assignment, text)

    def clean_value(self, key: str, value: object) -> Any:
        """A JSON-like value without secrets; ``key`` is where it stands."""
        if isinstance(value, Mapping):
            return {name: self.clean_value(str(name), item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean_value(key, item) for item in value]
        if not isinstance(value, str):
            return value
        if value and value != REDACTED and _is_secret(key):
            self._add_known(value)
            return REDACTED
        return self.clean_text(value)

    def _clean_message(self, content: dict[str, Any]) -> dict[str, object]:
        cleaned: dict[str, Any] = self.clean_value("", content)
        turn = str(content.get("episode_id", "")), str(content.get("turn", 0))  # which may be anything
        match content.get("type"):
            case "Observation" if cleaned != content:
                self._wiped.add(turn)
            case "Action":
                wipe = _TOKEN_FIELDS if cleaned != content else _TOKEN_FIELDS[:1] if turn in self._wiped else ()
                cleaned |= {field: _wipe(content[field]) for field in wipe if content.get(field)}
            case "EpisodeFinished":
                self._wiped = {each for each in self._wiped if each[0] != turn[0]}
        return cleaned

    def _replace_unreadable(self, entry: StreamEntry) -> StreamEntry:
        """Leave out whole what is no message: it cannot be cleaned by field."""
        self.redacted += 1
        return msgspec.structs.replace(entry, payload=REDACTED.encode())

    def _is_suspicious(self, payload: bytes) -> bool:
        lowered = payload.lower()
        for expression in _SUSPICIOUS:
            if expression.search(lowered):
                return True
        if lowered.count(b"token") > lowered.count(b"tokens"):
            return True
        return self._known_bytes is not None and self._known_bytes.search(payload) is not None

    def _add_known(self, value: str) -> None:
        if len(value) >= SHORTEST_KNOWN_SECRET and value not in self._known:
            self._known.add(value)
            self._known_bytes = _compile_alternatives(self._known)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def find_environment_secrets(variables: Mapping[str, str]) -> list[str]:
    """Values of environment variables whose names are those of secrets, without the line end of a file they were read from."""
    return [value.strip() for name, value in variables.items() if _is_secret(name) and not value.startswith(("/", "."))]


def _wipe(tokens: object) -> bytes:
    return bytes(len(tokens)) if isinstance(tokens, bytes) else b""


def is_wiped(ids: bytes) -> bool:
    """True for token ids that a redaction replaced with zeros."""
    return bool(ids) and not any(ids)


def _is_secret(key: str) -> bool:
    lowered = key.lower().replace("-", "_")
    return lowered.endswith("token") or any(word in lowered for word in SECRET_WORDS)


def _redact_assignment(found: re.Match[str]) -> str:
    return found.group() if found.group(2).startswith("[redacted") else found.group(1) + REDACTED


def _compile_alternatives(values: Iterable[str]) -> re.Pattern[bytes] | None:
    alternatives = [re.escape(value.encode()) for value in sorted(values)]
    return re.compile(b"|".join(alternatives)) if alternatives else None
