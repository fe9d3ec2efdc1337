"""A bad store serves a difference whose base is any file or address: an engine reads no other place than the store's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus_schemas import PolicyPublished
from fleetbus_workers.weights import fetch, store
from fleetbus_workers.weights.fetch import WeightsFetcher
from fleetbus_workers.weights.file import WeightsRejected


@pytest.mark.parametrize(
    "base", ["file:///etc/shadow", "http://169.254.169.254/latest", "/etc/shadow", "nats-object://other/x", "{here}/../x"]
)
async def test_a_difference_names_no_base_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    file = tmp_path / "l1-v000001.delta"
    file.write_bytes(b"")
    monkeypatch.setattr(fetch, "read_base_uri", lambda _: base.replace("{here}", tmp_path.as_uri()))
    opened: list[str] = []
    monkeypatch.setattr(store, "open_filesystem", lambda uri: opened.append(uri))
    published = PolicyPublished(policy="p", version=1, lineage="l1", step=1, uri=file.as_uri(), manifest=(), size_bytes=1)
    with pytest.raises(WeightsRejected, match="lies elsewhere"):
        await WeightsFetcher(tmp_path / "copies", None).fetch_local(published)
    assert opened == []
