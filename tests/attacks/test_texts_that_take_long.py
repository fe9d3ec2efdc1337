"""Texts of policies in which secrets are searched: none takes a time that grows with the square of its length."""

from __future__ import annotations

import time

import pytest

from fleetbus.logs.secret_formats import redact_command, redact_formats
from fleetbus.recording.redaction import Redactor

BYTES = 1 << 17
MOST_SECONDS = 5.0
"""Of CPU time; the longest took over a minute, and now takes half a second."""

TEXTS = {
    "words": "password",
    "keys": "api_key-",
    "long names": "x" * 64 + "token" + "y" * 64,
    "heads of tokens": "eyJ-",
    "flags": "--key",
    "dashes": "-",
    "one word": "a",
    "schemes": "a://",
    "keys of others": "glpat-",
}


@pytest.mark.parametrize("repeated", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("clean", [Redactor().clean_text, redact_formats, redact_command], ids=["record", "log", "command"])
def test_no_text_keeps_a_redactor_busy(repeated: str, clean: object) -> None:
    text = repeated * (BYTES // len(repeated))
    started = time.process_time()
    clean(text)  # type: ignore[operator]
    assert time.process_time() - started < MOST_SECONDS
