"""A certificate authority for one fleet, and the server's certificate signed by it. The authority's key is never written.

`fleetbus.auth.renewal` makes another one later; those of an authority of one's own may stand in their place.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from fleetbus.errors import UserError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")

CLOCK_SKEW = timedelta(hours=1)
"""How far a client's clock may lag behind when the certificates are new."""


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """PEM: the authority that clients trust, the server's certificate and its key."""

    authority: bytes
    server: bytes
    server_key: bytes


def make_certificates(hosts: Sequence[str], *, days: int) -> Certificates:
    """For a server that is reached under any of ``hosts`` (names or addresses), valid for ``days``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    now = datetime.now(UTC)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())

    def builder(subject: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.CertificateBuilder:
        usage = x509.KeyUsage(
            digital_signature=not is_authority,
            key_cert_sign=is_authority,
            crl_sign=is_authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("fleetbus authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    authority = builder("fleetbus authority", authority_key, is_authority=True).sign(authority_key, hashes.SHA256())
    server = (
        builder("fleetbus nats-server", server_key, is_authority=False)
        .add_extension(x509.SubjectAlternativeName([_build_general_name(host) for host in hosts]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    return Certificates(
        authority=authority.public_bytes(encoding),
        server=server.public_bytes(encoding),
        server_key=server_key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def lets_into_cluster(certificate: bytes) -> bool:
    """True if a server can show this certificate (PEM) to another one that it connects to."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        usage = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except (ValueError, x509.ExtensionNotFound):
        return True  # one of their own authority's: theirs to know
    return ExtendedKeyUsageOID.CLIENT_AUTH in usage.value


def read_hosts(certificate: bytes) -> list[str]:
    """The names and addresses that a server's certificate (PEM) is for; raises `UserError`."""
    from cryptography import x509

    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise UserError(f"the server's certificate names no hosts ({error}): renew it where it was made") from error
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def check_host(host: str) -> None:
    """Raise `UserError` unless a certificate can name ``host``."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > 253 or not all(map(_LABEL.fullmatch, host.removeprefix("*.").split("."))):
            raise UserError(
                f"--host {host} is not the name or address of a server; write other alphabets as in xn--bcher-kva.example"
            ) from None


def _build_general_name(host: str):  # type: ignore[no-untyped-def]  # cryptography is imported only to create certificates
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
