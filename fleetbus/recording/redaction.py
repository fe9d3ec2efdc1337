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
from fleetbus.logs import SECRET_WORDS
from fleetbus.secret_formats import FORMAT, REDACTED, redact_formats

SHORTEST_KNOWN_SECRET = 8
"""Shorter values of secret keys are not searched for elsewhere: they would hit innocent text."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,31}://[^\s/@\"'<>]+@[^\s\"'<>]+")
_WORDS = "|".join(word.replace("_", "[_-]?") for word in SECRET_WORDS if word not in ("seed", "credential"))
_ASSIGNED = re.compile(
    rf"(?i)([\w-]{{0,64}}(?:{_WORDS}|access[_-]?token|auth[_-]?token)[\w-]*[\"']?\s*[:=]\s*[\"']?)([^\s\"',;}}\]]{{4,}})"
)
_MARKS = (
    *(b"api", b"authorization", b"cookie", b"credential", b"passw", b"private", b"secret", b"bearer ", b"basic ", b"://"),
    *(
        b"sk-",
        b"hf_",
        b"akia",
        b"asia",
        b"a3t",
        b"abia",
        b"acca",
        b"xox",
        b"xapp-",
        b"eyj",
        b"aiza",
        b"ya29.",
        b"1//0",
        b"gocspx-",
    ),
    *(b"github_pat_", b"glpat-", b"gr1348941", b"npm_", b"pypi-", b"hooks.slack", b"sk_", b"rk_", b"whsec_", b"sg.", b"dapi"),
    *(b"_v1_", b"dckr_", b"hvs.", b"hvb.", b"hvr.", b".atlasv1.", b"pul-", b"pscale_", b"lin_", b"ntn_", b"glc_", b"glsa_"),
    *(
        b"nrak-",
        b"nrii-",
        b"nrjs-",
        b"sntr",
        b"shp",
        b"gsk_",
        b"xai-",
        b"pplx-",
        b"nvapi-",
        b"r8_",
        b"fw_",
        b"age-secret",
        b":aa",
    ),
)
"""A payload without any of these, in lower case, needs no closer look; searching for each takes half a microsecond."""

_GITHUB_TOKEN = re.compile(rb"gh[pousr]_|gl[a-z]{2,5}-[a-z0-9_=.-]{20}|\bsk[0-9a-f]{32}\b")
_SECRET_KEYS = tuple(re.compile(word + rb"[a-z0-9_-]{0,16}[\xa0-\xbf\xd9-\xdb]") for word in (b"seed", b"token"))
"""A key that names a seed or a token, in lower case, followed by the first byte of a msgpack text."""

_NKEY_SEED = re.compile(rb"S[A-Z2-7]{57}")

_TOKEN_FIELDS = ("prompt_delta", "sampled", "logprobs")


class Redactor:
    """Takes secrets out of entries, in the order of the log. ``redacted`` counts the entries that lost something.

    ``known`` are values that are secret wherever they stand; values found under secret keys are added to them.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = {value for value in known if len(value) >= SHORTEST_KNOWN_SECRET}
        self._known_bytes = _compile_alternatives(self._known)
        self._wiped: set[tuple[str, int]] = set()
        self.redacted = 0

    def clean(self, entry: StreamEntry) -> StreamEntry:
        """The entry without secrets; the same object if there were none."""
        payload = entry.payload
        is_action_after = bool(self._wiped) and b"prompt_delta" in payload
        if not is_action_after and not self._is_suspicious(payload):
            return entry
        try:
            content = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._replace_unreadable(entry)
        if not isinstance(content, dict):
            return self._replace_unreadable(entry)
        cleaned = self._clean_message(content)
        if cleaned == content:
            return entry
        self.redacted += 1
        return msgspec.structs.replace(entry, payload=msgspec.msgpack.encode(cleaned))

    def finds_secret(self, content: bytes) -> bool:
        """Whether a secret can be read in a file's bytes. Compressed content and pixels are not inspected."""
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

    def clean_value(self, key: str, value: Any) -> Any:
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

    def _clean_message(self, content: dict[str, Any]) -> dict[str, Any]:
        cleaned: dict[str, Any] = self.clean_value("", content)
        turn = (content.get("episode_id", ""), content.get("turn", 0))
        match content.get("type"):
            case "Observation" if cleaned != content:
                self._wiped.add(turn)
            case "Action":
                wipe = _TOKEN_FIELDS if cleaned != content else _TOKEN_FIELDS[:1] if turn in self._wiped else ()
                cleaned |= {field: bytes(len(content[field])) for field in wipe if content.get(field)}
            case "EpisodeFinished":
                self._wiped = {each for each in self._wiped if each[0] != turn[0]}
        return cleaned

    def _replace_unreadable(self, entry: StreamEntry) -> StreamEntry:
        """What is no message cannot be cleaned by field: it is left out whole."""
        self.redacted += 1
        return msgspec.structs.replace(entry, payload=REDACTED.encode())

    def _is_suspicious(self, payload: bytes) -> bool:
        lowered = payload.lower()
        if any(mark in lowered for mark in _MARKS) or any(key.search(lowered) for key in _SECRET_KEYS):
            return True
        if lowered.count(b"token") > lowered.count(b"tokens") or _GITHUB_TOKEN.search(lowered) or _NKEY_SEED.search(payload):
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
    """Values of environment variables whose names are those of secrets."""
    return [value for name, value in variables.items() if _is_secret(name) and not value.startswith(("/", "."))]


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
