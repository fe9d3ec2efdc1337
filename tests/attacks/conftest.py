"""``FLEETBUS_ATTACKS_ISOLATION`` (see run.py) leaves one isolation to the attacks, or none, which has to be true."""

from __future__ import annotations

import os

import pytest

from fleetbus_workers.environment.isolation.sandbox import IsolationUnavailable, backends

ONLY = os.environ.get("FLEETBUS_ATTACKS_ISOLATION", "")


@pytest.fixture(autouse=True)
def one_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    if ONLY == "none":
        with pytest.raises(IsolationUnavailable):
            backends.require_isolation()
    elif ONLY:
        try:
            isolation = backends.require_isolation((ONLY,))  # type: ignore[arg-type]
        except IsolationUnavailable as unavailable:
            pytest.skip(str(unavailable))
        monkeypatch.setattr(backends, "_detected", {backends.KINDS: isolation, (ONLY,): isolation, **others()})


def others() -> dict[tuple[str, ...], str]:
    return {(kind,): "left out" for kind in backends.KINDS if kind != ONLY}
