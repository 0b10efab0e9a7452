"""Asks whoever listens at a TCP port who it is, by the first steps of a libp2p connection.

libp2p's listeners greet, agree on a way to secure the connection, and in TLS show a certificate
that carries their key and is signed by it
(https://github.com/libp2p/specs/blob/master/tls/tls.md). That is as far as this goes: the listener
asks for our certificate next, and gets none.
"""

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dht.identity.peer_id import peer_id_of, verify

GREETING = b"\x13/multistream/1.0.0\n"
"""First bytes from every libp2p listener (multistream-select 1.0)."""
TLS = b"\x0b/tls/1.0.0\n"
SIGNED = b"libp2p-tls-handshake:"
"""Comes before the certificate's own key in what the host's key signs."""
KEY_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SEQUENCE, _OCTETS = 0x30, 0x04
"""Fixed by ASN.1 (X.690): tags of these types."""
_IDENTITY_HASH = 0x00
"""Fixed by multihash: the code of an identity hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerConfig:
    certificate_bytes_max: int = 4096
    """Those of libp2p have some 500; TLS takes 100 KB of them, which take 0.1 s to read."""


LISTENER = ListenerConfig()


async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether libp2p answers on a new connection. Raises OSError, IncompleteReadError."""
    writer.write(GREETING)
    return await reader.readexactly(len(GREETING)) == GREETING


async def identity_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
    """The peer id of a listener that has greeted; None where it does not tell.

    The caller sets the time limit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # who it is stands in the certificate, not who vouches for it
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    with suppress(OSError, asyncio.IncompleteReadError, ValueError):
        writer.write(TLS)
        size = await reader.readexactly(1)
        if size + await reader.readexactly(size[0]) != TLS:
            return None  # light peers offer noise alone
        await writer.start_tls(context)
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return None if shown is None else peer_of_certificate(shown)
    return None


def peer_of_certificate(data: bytes) -> str:
    """The peer id in a certificate in DER; raises ValueError for any other bytes."""
    if len(data) > LISTENER.certificate_bytes_max:
        raise ValueError(f"a certificate of {len(data)} bytes")
    try:
        certificate = x509.load_der_x509_certificate(data)
        extension = certificate.extensions.get_extension_for_oid(KEY_EXTENSION).value
        own = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception as error:  # a library's many words for bytes of a stranger that are wrong
        raise ValueError(f"no certificate of libp2p: {error}") from error
    if not isinstance(extension, x509.UnrecognizedExtension):
        raise ValueError("the extension with the key is of another type")
    key, signature = _signed_key(extension.value)
    peer_id = peer_id_of(bytes([_IDENTITY_HASH, len(key)]) + key)
    if not verify(peer_id, SIGNED + own, signature):
        raise ValueError("the host's key has not signed the certificate's")
    return peer_id


def _signed_key(der: bytes) -> tuple[bytes, bytes]:
    """The two octet strings of ``SignedKey``: the host's public key as protobuf, a signature."""
    body, rest = _element(der, _SEQUENCE)
    key, body = _element(body, _OCTETS)
    signature, body = _element(body, _OCTETS)
    if rest or body or len(key) > 0x7F:
        raise ValueError("the host's key is followed by something, or no Ed25519 key")
    return key, signature


def _element(der: bytes, tag: int) -> tuple[bytes, bytes]:
    """The content of a DER element with a short length, up to 255, and what follows it."""
    if len(der) < 3 or der[0] != tag:
        raise ValueError("no such element")
    size, at = (der[2], 3) if der[1] == 0x81 else (der[1], 2)
    if der[1] > 0x81 or len(der) < at + size:
        raise ValueError("an element is longer than what holds it")
    return der[at : at + size], der[at + size :]
