"""An offer on a local network says what was put into it, or is none; what is meant is chosen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import UserError
from dht.identity.peer_id import Identity, short_name
from dht.networks.invitation import Invitation, text_of
from dht.networks.local_network import (
    LOCAL_NETWORK,
    SERVICE,
    Instances,
    Offer,
    chosen,
    offer_of_peer,
    read_offer,
    txt_of,
)

PEERS = tuple(Identity(bytes([number]) * 32).peer_id for number in range(1, 7))
PRIVATE = ("/ip4/192.168.1.7/tcp/31330", "/ip4/10.0.0.9/tcp/31330", "/ip6/fd00::7/tcp/31330")


def offer(
    number: int = 0, network: str = "anabranch", model: str = "brook", fingerprint: str = "ab" * 32
) -> Offer:
    told = [f"{where}/p2p/{PEERS[number]}" for where in PRIVATE]
    return offer_of_peer(f"pc-{number}", network, told, model, fingerprint)


def read(
    said: Invitation, instance: str = f"{PEERS[0]}.{SERVICE}", name: bytes = b"pc", size: int = 0
) -> Offer:
    text = text_of(said).encode()
    parts = [
        text[n : n + LOCAL_NETWORK.part_max] for n in range(0, len(text), LOCAL_NETWORK.part_max)
    ]
    properties = {b"i%d" % n: part for n, part in enumerate(parts)}
    return read_offer(instance, size, {b"name": name, **properties})


def encoded(made: Offer) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in txt_of(made).items()}


def test_an_offer_is_read_as_it_was_made_and_shown_whole() -> None:
    made = offer()
    properties = encoded(made)
    assert read_offer(f"{PEERS[0]}.{SERVICE}", 600, properties) == made
    assert all(len(key) + 1 + len(value or b"") <= 255 for key, value in properties.items())
    assert str(made) == (
        "pc-0: brook (fingerprint abababababababab…), network anabranch, 192.168.1.7:31330,"
        " 10.0.0.9:31330, [fd00::7]:31330"
    )


@given(name=st.text(max_size=100), network=st.text("日aé ", min_size=1, max_size=64))
def test_names_of_any_letters_fit_a_record(name: str, network: str) -> None:
    made = offer_of_peer(name, network, [f"{PRIVATE[0]}/p2p/{PEERS[0]}"] * 9, "m", "ab" * 32)
    properties = encoded(made)
    assert read_offer(f"{PEERS[0]}.{SERVICE}", 0, properties) == made
    lengths = [len(key) + 2 + len(value or b"") for key, value in properties.items()]
    assert max(lengths) <= 256
    assert sum(lengths) <= LOCAL_NETWORK.txt_bytes_max


def test_only_private_addresses_are_told() -> None:
    others = ("/ip4/127.0.0.1", "/ip4/1.1.1.1", "/ip6/fe80::1", "/dns4/pc.lan", "/ip6/2606::1")
    told = [f"{host}/tcp/1/p2p/{PEERS[0]}" for host in others]
    private = f"{PRIVATE[0]}/p2p/{PEERS[0]}"
    made = offer_of_peer("\x1b\n", "anabranch", [*told, private], "brook", "")
    assert made.invitation.addresses == (private,)
    assert made.name == short_name(PEERS[0])
    with pytest.raises(UserError, match="no address"):
        offer_of_peer("pc", "anabranch", told, "brook", "")


@pytest.mark.parametrize(
    "where",
    ["/ip4/1.1.1.1", "/ip4/127.0.0.1", "/ip4/169.254.169.254", "/dns4/printer.local", "/ip6/::1"],
)
def test_an_offer_at_an_address_that_is_not_private_is_none(where: str) -> None:
    private = f"{PRIVATE[0]}/p2p/{PEERS[0]}"
    said = Invitation(network="n", addresses=(private, f"{where}/tcp/80/p2p/{PEERS[0]}"))
    with pytest.raises(ValueError, match="not private"):
        read(said)


def test_a_made_up_offer_is_none() -> None:
    said = offer().invitation
    assert read(said).invitation == said
    with pytest.raises(ValueError, match="another peer"):
        read(said, f"{PEERS[1]}.{SERVICE}")
    with pytest.raises(ValueError, match="another peer"):
        read(replace(said, addresses=(*said.addresses, f"{PRIVATE[0]}/p2p/{PEERS[1]}")))
    for name in (
        b"",
        b" pc",
        b"a\x1b]0;",
        "\u202epc".encode(),
        b"\xff",
        b"x" * (LOCAL_NETWORK.name_max + 1),
    ):
        with pytest.raises(ValueError, match=r"name|utf-8"):
            read(said, name=name)
    with pytest.raises(ValueError, match="bytes"):
        read(said, size=LOCAL_NETWORK.txt_bytes_max + 1)
    whole = encoded(offer(model="m" * 128))
    assert b"i1" in whole
    for key, value in ((b"i0", None), (b"i1", b""), (b"i2", b"A"), (b"i0", b"\xff"), (b"i4", b"=")):
        with pytest.raises(ValueError, match=r"no invitation|ascii"):
            read_offer(f"{PEERS[0]}.{SERVICE}", 0, {**whole, key: value})


@given(
    instance=st.sampled_from([f"{PEERS[0]}.{SERVICE}", SERVICE, "", f"x.{SERVICE}"]),
    properties=st.dictionaries(
        st.sampled_from([b"name", b"i0", b"i1", b"i4", b"other"]),
        st.none() | st.binary(max_size=300) | st.sampled_from(list(encoded(offer()).values())),
    ),
)
def test_whatever_is_told_is_an_offer_or_none(
    instance: str, properties: dict[bytes, bytes | None]
) -> None:
    try:
        made = read_offer(instance, 0, properties)
    except ValueError:
        return
    assert str(made).isprintable()


def test_a_flood_of_instances_takes_bounded_room() -> None:
    heard = Instances()
    for number in range(10_000):
        heard.add(f"{number}.{SERVICE}")
        heard.add(f"{PEERS[0]}.elsewhere.local.")
    assert heard.names == ()
    names = [f"{Identity(number.to_bytes(32)).peer_id}.{SERVICE}" for number in range(200)]
    for name in names:
        heard.add(name)
    assert heard.names == tuple(names[: LOCAL_NETWORK.heard_max])
    heard.remove(names[0])
    heard.add(names[-1])
    assert heard.names == (*names[1 : LOCAL_NETWORK.heard_max], names[-1])


def test_offers_of_one_network_and_model_come_together() -> None:
    both = chosen([offer(0), offer(1)])
    assert both is not None
    assert [each.rpartition("/")[2] for each in both.addresses] == [*PEERS[:2], *PEERS[:2]]
    assert (both.network, both.model, both.fingerprint) == ("anabranch", "brook", "ab" * 16)
    assert chosen([]) is None
    assert chosen([offer()], network="lab") is None


def test_several_offers_are_refused_by_a_list_until_one_is_said() -> None:
    lab, other, false = offer(1, "lab"), offer(2, model="org/name"), offer(3, fingerprint="cd" * 32)
    for several in ([offer(), lab], [offer(), other], [offer(), false]):
        with pytest.raises(UserError, match="several") as refused:
            chosen(several)
        assert "network anabranch with brook (abababababababab)" in str(refused.value)
    assert chosen([offer(), lab], network="lab") == lab.invitation
    assert chosen([offer(), other], model="org/name") == other.invitation
    assert chosen([offer(), false], fingerprint="AB" * 32) == offer().invitation
    assert chosen([offer(), false], model="brook", fingerprint="cdcd") == false.invitation
    with pytest.raises(UserError, match="other weights"):
        chosen([offer(), false], fingerprint="ef" * 8)


def test_peers_of_another_model_let_in_and_vouch_for_nothing() -> None:
    for options in ({"model": "org/mine"}, {"any_model": True}):
        found = chosen([offer(0), offer(2, model="org/name")], **options)  # type: ignore[arg-type]
        assert found is not None
        assert (found.network, found.model, found.fingerprint) == ("anabranch", "", "")
        assert len(found.addresses) == 4
    alone = chosen([offer(0), offer(2)], any_model=True)
    assert alone is not None
    assert alone.fingerprint, "the only model is vouched for"
    with pytest.raises(UserError, match="network lab"):
        chosen([offer(), offer(1, "lab")], model="org/mine")
