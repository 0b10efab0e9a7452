"""``invite`` prints one word that others can use; with ``--qr`` also as a picture."""

import sys
from types import SimpleNamespace

import pytest

from client import invite
from dht.identity.peer_id import Identity
from dht.networks.invitation import read_invitation
from dht.networks.remembered import Remembered, remember

ADDRESS = f"/ip4/10.0.0.4/tcp/1/p2p/{Identity(b'1' * 32).peer_id}"


@pytest.fixture(autouse=True)
def kept(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_MEMORY", f"{tmp_path}/network.json")
    home = Remembered(
        network="home",
        initial_peers=(ADDRESS,),
        model="brook",
        model_name="brook",
        fingerprint="cd" * 32,
    )
    remember(home, lambda _: None)


def test_it_invites_to_the_network_that_is_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["invite"])
    assert invite.run() == 0
    said = read_invitation(capsys.readouterr().out.strip())
    assert (said.network, said.addresses) == ("home", (ADDRESS,))
    assert (said.model, said.fingerprint) == ("brook", "cd" * 16)


def test_a_picture_needs_a_package_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["invite", "--qr"])
    monkeypatch.setitem(sys.modules, "segno", None)
    assert invite.run() == 2
    said = capsys.readouterr()
    assert read_invitation(said.out.strip()).network == "home"
    (line,) = said.err.splitlines()[-1:]
    assert line == f"error: a QR code needs segno: {sys.executable} -m pip install segno"
    drawn: list[str] = []

    def make(text: str, micro: bool) -> SimpleNamespace:
        return SimpleNamespace(terminal=lambda compact: drawn.append(text))

    monkeypatch.setitem(sys.modules, "segno", SimpleNamespace(make=make))
    assert invite.run() == 0
    assert drawn == [capsys.readouterr().out.strip()]
