"""Contexts of the nats command line and credentials files: what is read, what is refused; no message tells a secret."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from fleetbus.auth.access import build_access
from fleetbus.bus.nats.credentials import check_credentials
from fleetbus.bus.nats.server_context import (
    build_options,
    describe_missing_context,
    list_context_files,
    read_server_context,
    resolve_url,
)
from fleetbus.config.settings import Configuration, NatsSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.agent.factory import list_secret_files
from fleetbus_workers.up.checks import check_server_answers
from tests.support.jwt_accounts import Platform


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "nats/context"
    folder.mkdir(parents=True)
    return folder


def write(contexts: Path, name: str, **keys: Any) -> None:
    (contexts / f"{name}.json").write_text(json.dumps(keys))


@pytest.mark.parametrize(
    "url",
    ["nats://localhost:4222", "localhost:4222", "localhost", "a,b", "../secret", "x/y", "", ".hidden", "wss://h", "[::1]"],
)
def test_what_names_a_server_is_no_context(contexts: Path, url: str) -> None:
    (contexts.parent / "secret.json").write_text("{}")
    (contexts / ".hidden.json").write_text("{}")
    assert read_server_context(url) is None
    assert resolve_url(url) == url


def test_a_context_says_where_the_server_is_and_who_connects(contexts: Path) -> None:
    write(contexts, "prod", url="tls://a:4222,tls://b:4222", user="u", password="p", nsc="", color_scheme="", tls_first=False)
    context = read_server_context("prod")
    assert context is not None and resolve_url("prod") == "tls://a:4222,tls://b:4222"
    assert build_options("prod", context) == {"user": "u", "password": "p"}
    assert build_options("prod", context, identified=True) == {}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"url": "nats://h", "nsc": "nsc://o/a/u", "password": "hunter2hunter2"}, "uses nsc"),
        ({"url": "nats://h", "jetstream_domain": "hub"}, "uses jetstream_domain"),
        ({"url": "nats://h", "socks_proxy": "socks5://x"}, "uses socks_proxy"),
        ({"password": "hunter2hunter2"}, "names no server"),
        ({"url": ["hunter2hunter2"]}, "is no JSON as"),
    ],
)
def test_a_context_that_cannot_be_kept_to_is_refused_in_one_line(contexts: Path, keys: dict[str, Any], said: str) -> None:
    write(contexts, "prod", **keys)
    with pytest.raises(UserError, match=said) as refused:
        read_server_context("prod")
    assert "\n" not in str(refused.value) and "hunter2" not in str(refused.value)


def test_a_context_that_is_no_json_is_refused_without_its_content(contexts: Path) -> None:
    (contexts / "prod.json").write_bytes(b'{"password": "hunter2hunter2\xff')
    with pytest.raises(UserError, match="is no JSON as") as refused:
        read_server_context("prod")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("keys", [{"creds": "gone"}, {"nkey": "gone"}, {"ca": "gone"}, {"cert": "gone", "key": "gone"}])
def test_files_of_a_context_that_are_not_there_are_named(contexts: Path, keys: dict[str, str]) -> None:
    write(contexts, "prod", url="nats://h", **keys)
    context = read_server_context("prod")
    assert context is not None
    with pytest.raises(UserError, match="gone"):
        build_options("prod", context)


def test_whoever_misspells_a_context_is_told_which_there_are(contexts: Path) -> None:
    assert describe_missing_context("prodd") == ""
    write(contexts, "prod", url="nats://h")
    assert describe_missing_context("prodd").endswith("these are: prod")
    assert describe_missing_context("nats://h:4222") == ""


@pytest.mark.parametrize(
    ("url", "port"), [("wss://h", 443), ("ws://h", 80), ("tls://h", 4222), ("h", 4222), ("wss://h:8443", 8443)]
)
def test_a_server_is_looked_for_at_the_port_of_its_protocol(url: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise ConnectionRefusedError(111, f"port {address[1]}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(UserError, match=f"port {port}$"):
        check_server_answers(url)


def test_agents_see_no_file_of_a_context(contexts: Path, tmp_path: Path) -> None:
    write(contexts, "prod", url="nats://h", creds=str(tmp_path / "a.creds"), key="~/k.pem")
    expected = {contexts / "prod.json", tmp_path / "a.creds", Path.home() / "k.pem"}
    assert set(list_context_files("prod")) == expected
    settings = Configuration(run=RunSettings(folder=str(tmp_path)), nats=NatsSettings(url="prod"))
    assert expected <= set(list_secret_files(settings))
    assert list_context_files("nats://h") == []


@pytest.mark.parametrize("content", [b"", b"SUAAA", b"-----BEGIN NATS USER JWT-----\n", b"\xff" * 100_000])
def test_a_file_that_holds_no_credentials_is_refused_and_not_read_for_ever(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.creds"
    file.write_bytes(content)
    with pytest.raises(UserError, match="holds no credentials"):
        build_access("monitor", str(file), "r")
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        build_access("monitor", str(file), "r")


def test_credentials_are_taken_as_nsc_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "worker"
    Platform().write_credentials(file)
    assert check_credentials(file) == file
    assert build_access("learner", str(file), "r") == {"credentials": file}
