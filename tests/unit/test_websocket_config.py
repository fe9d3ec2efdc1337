"""The listener for WebSockets in a server's configuration: on loopback unless it is told otherwise, and never without TLS."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from fleetbus.auth.websocket_config import parse_address, websocket_listener


@pytest.mark.parametrize(
    ("text", "address"),
    [("443", "127.0.0.1:443"), (":8443", "127.0.0.1:8443"), ("0.0.0.0:443", "0.0.0.0:443"), ("[::]:443", "[::]:443")],
)
def test_an_address_is_on_loopback_unless_a_host_is_given(text: str, address: str) -> None:
    assert parse_address(text) == address
    assert f'  listen: "{address}"' in websocket_listener(PurePosixPath("/keys"), address)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:65536", "-1", "٤٤٣"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give PORT or HOST:PORT"):
        parse_address(text)


def test_a_listener_has_the_certificate_of_the_server() -> None:
    lines = websocket_listener(PurePosixPath("/keys"), "127.0.0.1:443")
    assert '    cert_file: "/keys/server.pem"' in lines and not any("no_tls" in line for line in lines)
