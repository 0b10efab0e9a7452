"""An invitation says what was put into it, or that it is none."""

import base64
import hashlib

import base58
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import UserError
from dht.identity.multiaddr import is_loopback, split
from dht.identity.peer_id import Identity
from dht.networks.invitation import (
    INVITATION_BOUNDS,
    SCHEME,
    Invitation,
    invitation_to,
    is_name,
    read_invitation,
    text_of,
)

PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in range(1, 7))
ADDRESS = f"/ip4/1.2.3.4/tcp/31337/p2p/{PEERS[0]}"
USUAL = Invitation(
    network="anabranch", addresses=(ADDRESS,), model="org/name", fingerprint="0123456789abcdef" * 2
)

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.ip_addresses(network="2f00::/8").map(lambda ip: f"/ip6/{ip}"),
    st.ip_addresses(network="127.0.0.0/8").map(lambda ip: f"/ip4/{ip}"),
    st.just("/dns4/peer.example.org"),
)
addresses = st.builds(
    lambda host, port, peer: f"{host}/tcp/{port}/p2p/{peer}",
    hosts,
    st.integers(0, 65_535),
    st.sampled_from(PEERS),
)
networks = st.text(min_size=1, max_size=64).filter(lambda t: "/" not in t and t.isprintable())


def packed(*body: object, version: int = 2) -> str:
    """The text of an invitation with any content, its checksum right."""
    data = bytes([version]) + msgspec.msgpack.encode(body)
    data += hashlib.sha256(data).digest()[:4]
    return SCHEME + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def body(address: str | bytes = bytes((1, 2, 3, 4, 0, 1)), peer: bytes = b"") -> list[object]:
    where = address.encode() if isinstance(address, str) else address
    return [peer or base58.b58decode(PEERS[0]), [where]]


def test_what_the_hostile_ones_below_are_made_of_is_an_invitation() -> None:
    address = f"/ip4/1.2.3.4/tcp/1/p2p/{PEERS[0]}"
    assert read_invitation(packed("n", "m", b"", [body()])).addresses == (address,)


@given(
    network=networks,
    told=st.lists(addresses, min_size=1, max_size=6, unique=True),
    model=st.sampled_from(["", "brook", "org/name", "org/name@v1.2", "a-b_c.9"]),
    fingerprint=st.binary(min_size=32, max_size=32).map(bytes.hex),
)
def test_what_is_said_is_read(network: str, told: list[str], model: str, fingerprint: str) -> None:
    made = invitation_to(network, told, model, fingerprint)
    text = text_of(made)
    assert read_invitation(text) == made
    assert made.network == network
    assert made.model == model
    elsewhere = {split(each)[0] for each in told if not is_loopback(each)}
    kept = [each for each in told if not is_loopback(each) or split(each)[0] not in elsewhere]
    assert made.addresses == tuple(kept[: INVITATION_BOUNDS.addresses_max])
    assert made.fingerprint == (fingerprint[:32] if model else "")
    assert len(text) <= INVITATION_BOUNDS.text_max
    assert text.isascii()
    assert set(text) <= set(
        SCHEME + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    )


@given(at=st.integers(0, 10_000), letter=st.sampled_from("AZaz09-_=+/ \n\u202e"))
def test_a_slip_is_no_other_network(at: int, letter: str) -> None:
    text = text_of(USUAL)
    at = len(SCHEME) + at % (len(text) - len(SCHEME))
    for slip in (text[:at] + letter + text[at + 1 :], text[:at] + letter + text[at:], text[:at]):
        if slip != text:
            with pytest.raises(UserError):
                read_invitation(slip)


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200).map(lambda b: b.hex())))
def test_any_text_is_an_invitation_or_none(text: str) -> None:
    with pytest.raises(UserError):
        read_invitation(SCHEME + text)


json_like = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(0, 9), st.text(max_size=9), st.binary(max_size=9)
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=9,
)


@given(st.lists(json_like, max_size=6))
def test_a_right_checksum_over_anything_is_not_enough(content: list[object]) -> None:
    with pytest.raises(UserError):
        read_invitation(packed(*content))


@pytest.mark.parametrize(
    "text",
    [
        packed("net\x1b]0;owned\x07", "", b"", [body()]),
        packed("net\u202egnp", "", b"", [body()]),
        packed("a/b", "", b"", [body()]),
        packed("", "", b"", [body()]),
        packed("n" * 65, "", b"", [body()]),
        packed("n", "/etc", b"", [body()]),
        packed("n", "../weights", b"", [body()]),
        packed("n", "~/weights", b"", [body()]),
        packed("n", "./weights", b"", [body()]),
        packed("n", "org/name@x/../../y", b"", [body()]),
        packed("n", "--config=/etc/passwd", b"", [body()]),
        packed("n", "a b", b"", [body()]),
        packed("n", "org/name/deep", b"", [body()]),
        packed("n", "C:\\weights", b"", [body()]),
        packed("n", "m", b"short", [body()]),
        packed("n", "m", b"x" * 17, [body()]),
        packed("n", "m", b"", []),
        packed("n", "m", b"", [body()] * 5),
        packed("n", "m", b"", [body("/ip4/1.2.3.4/udp/1/quic-v1")]),
        packed("n", "m", b"", [body("/unix/tmp/socket")]),
        packed("n", "m", b"", [body("/dns4/evil\x1b[2J/tcp/1")]),
        packed("n", "m", b"", [body("/dns4/a;rm -rf ~/tcp/1")]),
        packed("n", "m", b"", [body("/ip4/1.2.3.4/tcp/99999")]),
        packed("n", "m", b"", [body(peer=b"x" * 38)]),
        packed("n", "m", b"", [body()], "more"),
        packed("n", "m", b"", [body()], version=3),
        packed("n", "m", b"", [body("/ip4/1.2.3.4/tcp/1")]),
        packed("n", "m", b"", [body(b"1234567")]),
        packed("n", "m", b"", [body(), body()]),
        packed("n", "m", b"", [[body()[0], []]]),
        text_of(USUAL) + "=",
        text_of(USUAL).replace(SCHEME, "ANABRANCH:"),
        SCHEME + "A" * 100_000,
        SCHEME,
    ],
)
def test_a_hostile_invitation_is_none(text: str) -> None:
    with pytest.raises(UserError) as refused:
        read_invitation(text)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


def test_an_invitation_carries_what_it_can() -> None:
    relayed = f"{ADDRESS}/p2p-circuit/p2p/{PEERS[1]}"
    made = invitation_to("anabranch", [relayed, ADDRESS], "a model's folder", "ab" * 32)
    assert made == Invitation(network="anabranch", addresses=(ADDRESS,))
    with pytest.raises(UserError, match="no address"):
        invitation_to("anabranch", [relayed])


def test_loopback_is_left_out_where_there_is_another_way() -> None:
    here, other = f"/ip4/127.0.0.1/tcp/31337/p2p/{PEERS[0]}", f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[1]}"
    assert invitation_to("anabranch", [here, ADDRESS, other]).addresses == (ADDRESS, other)
    assert invitation_to("anabranch", [here]).addresses == (here,)


def test_an_invitation_to_one_address_is_short() -> None:
    assert len(text_of(USUAL)) < 140


def test_another_version_says_so() -> None:
    with pytest.raises(UserError, match="version 1"):
        read_invitation(packed("n", "m", b"", [body()], version=1))


@pytest.mark.parametrize("model", ["brook", "org/name", "Llama-3.1-8B", "org/name@main", "_x"])
def test_names_of_models(model: str) -> None:
    assert is_name(model)
