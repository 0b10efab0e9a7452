"""Who listens at a port, by the key in its certificate."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from dht.identity.peer_id import Identity, peer_id_bytes
from dht.transport.listener import (
    GREETING,
    KEY_EXTENSION,
    LISTENER,
    SIGNED,
    TLS,
    greets,
    identity_of,
    peer_of_certificate,
)

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


def certified(shown: Identity, signer: Identity, directory: Path) -> tuple[bytes, Path]:
    """A certificate that shows one peer's key, signed by another's, in DER and with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    public, signature = peer_id_bytes(shown.peer_id)[2:], signer.sign(SIGNED + own)
    parts = b"".join(bytes([4, len(each)]) + each for each in (public, signature))
    name = x509.Name([])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.UnrecognizedExtension(KEY_EXTENSION, bytes([0x30, len(parts)]) + parts),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    file = directory / "certificate.pem"
    file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + certificate.public_bytes(Encoding.PEM)
    )
    return certificate.public_bytes(Encoding.DER), file


@asynccontextmanager
async def peer(file: Path) -> AsyncIterator[int]:
    """A port where libp2p secures connections with a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readexactly(len(GREETING + TLS))
        writer.write(TLS)
        await writer.start_tls(context)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def found_at(port: int) -> str | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        assert await greets(reader, writer)
        return await identity_of(reader, writer)
    finally:
        writer.close()


async def test_a_listener_is_known_by_its_key(tmp_path: Path) -> None:
    _, file = certified(ALICE, ALICE, tmp_path)
    async with peer(file) as port:
        assert await found_at(port) == ALICE.peer_id


def test_a_certificate_is_measured_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x509, "load_der_x509_certificate", pytest.fail)
    with pytest.raises(ValueError, match="a certificate of 4097 bytes"):
        peer_of_certificate(bytes(LISTENER.certificate_bytes_max + 1))


async def test_nobody_shows_anothers_key(tmp_path: Path) -> None:
    data, file = certified(ALICE, BOB, tmp_path)
    with pytest.raises(ValueError, match="has not signed"):
        peer_of_certificate(data)

    async with peer(file) as port:
        assert await found_at(port) is None


def test_damaged_certificates_are_none(tmp_path: Path) -> None:
    data, _ = certified(ALICE, ALICE, tmp_path)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            with suppress(ValueError):
                assert peer_of_certificate(damaged) == ALICE.peer_id
