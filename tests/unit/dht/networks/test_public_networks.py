"""The list of public networks: entries say what their founders signed, or are left out."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.networks import LISTED, NONE_LISTED, main, parse, read_file, table
from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.networks.invitation import invitation_to, text_of
from dht.networks.public_networks import (
    FILE_BYTES_MAX,
    Entry,
    doubles,
    entry_of,
    read_list,
    toml_of,
    wrong_with,
)

FOUNDER, OTHER = Identity(b"1" * 32), Identity(b"2" * 32)


def invitation(peer: Identity = FOUNDER, fingerprint: str = "ab" * 16) -> str:
    address = f"/ip4/1.1.1.1/tcp/31337/p2p/{peer.peer_id}"
    return text_of(invitation_to("river", [address], "org/name", fingerprint))


def entry(**named: Any) -> Entry:
    about = 'A "quoted" word, ünïcode, and a \\ too'
    given = {"contact": "https://example.org/about", "about": about, **named}
    return entry_of(invitation(), FOUNDER, **given)


def test_every_listed_network_is_signed_and_named_once() -> None:
    entries = read_list(LISTED.read_bytes())
    assert {each.name: wrong_with(each) for each in entries} == {each.name: "" for each in entries}
    assert not doubles(entries)


def test_an_entry_is_read_as_it_was_printed() -> None:
    made = entry()
    assert read_list((toml_of(made) + toml_of(made)).encode()) == (made, made)
    assert wrong_with(made) == ""
    assert doubles((made, made)) == {"river"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "lake"}, "another network or model"),
        ({"model": "org/other"}, "another network or model"),
        ({"contact": "https://elsewhere.example"}, "did not sign"),
        ({"about": "Free money"}, "did not sign"),
        ({"signature": "AAAA"}, "did not sign"),
        ({"signature": "no base64"}, "did not sign"),
        ({"founder": OTHER.peer_id}, "not in its invitation"),
        ({"founder": "me"}, "no peer id"),
        ({"invitation": invitation(OTHER)}, "not in its invitation"),
        ({"invitation": invitation(fingerprint="")}, "names no fingerprint"),
        ({"invitation": "anabranch:x"}, "no invitation"),
        ({"contact": "javascript:alert(1)"}, "neither an https:// address"),
    ],
)
def test_what_the_founder_did_not_sign_is_left_out(changed: dict[str, str], said: str) -> None:
    assert said in wrong_with(msgspec.structs.replace(entry(), **changed))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"[[network]]\nname = 1",
        b"network = 3",
        b"[[network]]\nname = 'river'",
        b"other = 1",
        b"a = " + b"[" * 20_000,
        b"#" * (FILE_BYTES_MAX + 1),
        toml_of(entry()).encode() + b"more = 1\n",
        b"network = [" + b"{}," * (256 + 1) + b"]",
    ],
    ids=range(9),
)
def test_a_strangers_list_is_typed_and_bounded(data: bytes) -> None:
    with pytest.raises(UserError, match="list of networks"):
        read_list(data)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_bytes_are_a_list_or_are_refused(data: bytes) -> None:
    try:
        entries = read_list(data)
    except UserError:
        return
    assert all(isinstance(each, Entry) for each in entries)


def test_contacts_that_cannot_be_shown_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be listed"):
        entry(about="two\nlines")
    with pytest.raises(UserError, match="cannot be listed"):
        entry(contact="call me")


def test_people_read_who_answers_first_and_that_prompts_are_seen(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table((), ()) == NONE_LISTED
    forged = msgspec.structs.replace(entry(), about="forged", name="river")
    path = tmp_path / "networks.toml"
    path.write_text(toml_of(forged))
    assert read_file(path) == ()
    assert "left out: 'river': its founder did not sign it" in capsys.readouterr().err
    silent = msgspec.structs.replace(entry(), name="brook")
    shown = table((silent, entry()), ("", "serves it now, by 3 peers")).splitlines()
    assert shown[0].startswith("river")
    assert "contact: https://example.org/about" in shown[1]
    assert shown[2] == f"  {invitation()}"
    assert "does not answer now" in shown[4]
    assert shown[-1] == "Peers can read the prompts that they serve."


def test_a_founder_signs_an_entry_with_the_key_of_its_peer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    key = tmp_path / "identity.key"
    key.write_bytes(FOUNDER.libp2p_bytes())
    key.chmod(0o600)
    words = ["--announce", "--contact", "me@example.org", "--identity", str(key), invitation()]
    monkeypatch.setattr("sys.argv", ["networks", *words])
    assert asyncio.run(main(parse())) == 0
    (made,) = read_list(capsys.readouterr().out.encode())
    assert (wrong_with(made), made.contact) == ("", "me@example.org")
    assert base64.b64decode(made.signature, validate=True)
    monkeypatch.setattr("sys.argv", ["networks", "--announce", invitation()])
    with pytest.raises(UserError, match="go together"):
        parse()
