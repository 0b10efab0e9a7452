"""Which network a command means, and that it says where that came from."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from dht.command_line import Parser
from dht.errors import NetworkError, UserError
from dht.identity.peer_id import Identity
from dht.networks.invitation import invitation_to, text_of
from dht.networks.local_network import LOCAL_NETWORK, Offer
from dht.networks.remembered import Remembered, remember
from dht.swarm_options import add_model, add_swarm, settle_swarm
from node.owner.reporter import Reporter
from node.peer import join_options
from node.peer.remembering import remember_served
from tests.unit.records import MODEL

PEER = Identity(b"1" * 32).peer_id
TYPED, INVITED, NAMED, KEPT = (f"/ip4/10.0.0.{n}/tcp/1/p2p/{PEER}" for n in (1, 2, 3, 4))
SAID = "ab" * 16
INVITATION = text_of(invitation_to("lab", [INVITED], "org/name", SAID))
BARE = text_of(invitation_to("lab", [INVITED], "brook", SAID))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_MEMORY", str(tmp_path / "network.json"))
    monkeypatch.delenv("ANABRANCH_PEERS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keep(model: str = "brook") -> None:
    kept = Remembered(
        network="home",
        initial_peers=(KEPT,),
        model=model,
        model_name="brook",
        fingerprint="cd" * 32,
    )
    remember(kept, lambda _: None)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[Offer]:
    """What is offered on the local network; a test fills it."""
    told: list[Offer] = []
    monkeypatch.setattr("dht.networks.mdns.look", lambda: tuple(told))
    return told


def an_offer(network: str = "lab", model: str = "brook", fingerprint: str = SAID) -> Offer:
    return Offer(name="pc", invitation=invitation_to(network, [NAMED], model, fingerprint))


def settled(*words: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_swarm(parser)
    add_model(parser)
    arguments = parser.parse_args(words)
    settle_swarm(arguments)
    return arguments


def joined(*words: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["join", "--cpu", *words])
    return join_options.parse()


def test_typed_addresses_win_over_the_environment_and_that_over_the_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep()
    read = settled()
    assert (read.initial_peers, read.network, read.model) == ([KEPT], "home", "brook")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("network home, remembered in ")
    assert line.endswith("network.json; forget with `anabranch forget`")
    monkeypatch.setenv("ANABRANCH_PEERS", f"{NAMED}, {KEPT}")
    read = settled("--model", "m")
    assert (read.initial_peers, read.network) == ([NAMED, KEPT], "anabranch")
    assert capsys.readouterr().err == "peers are those of ANABRANCH_PEERS\n"
    read = settled("--model", "m", "--initial-peers", TYPED)
    assert (read.initial_peers, read.network) == ([TYPED], "anabranch")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flag", [(), ("--initial-peers",)])
def test_an_invitation_takes_the_place_of_an_address(
    flag: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    read = settled(*flag, INVITATION)
    assert (read.initial_peers, read.network) == ([INVITED], "lab")
    assert (read.model, read.fingerprint) == ("org/name", SAID)
    assert capsys.readouterr().err == (
        "network lab, model org/name, by an invitation to /ip4/10.0.0.2/tcp/1\n"
    )


def test_the_environment_may_hold_an_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_PEERS", INVITATION)
    assert settled().initial_peers == [INVITED]


def test_what_is_typed_beside_an_invitation_must_agree() -> None:
    assert settled(INVITATION, "--fingerprint", SAID + "00").fingerprint == SAID + "00"
    assert settled(INVITATION, "--model", "org/other").fingerprint == ""
    for words in (("--network", "other"), ("--fingerprint", "f" * 32), (BARE,)):
        with pytest.raises(UserError):
            settled(INVITATION, *words)
    with pytest.raises(UserError, match="several"):
        settled("--initial-peers", INVITATION, BARE)
    with pytest.raises(UserError, match="no invitation"):
        settled("hello", "--model", "m")


def test_a_remembered_network_is_not_taken_for_another() -> None:
    keep()
    assert settled("--network", "home").initial_peers == [KEPT]
    with pytest.raises(UserError, match="network home is remembered"):
        settled("--network", "lab")


def test_nothing_known_says_what_to_give() -> None:
    with pytest.raises(UserError, match="invitation"):
        settled("--model", "m")
    with pytest.raises(UserError, match="--model"):
        settled("--initial-peers", TYPED)


def test_a_damaged_memory_is_said_and_left_aside(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "network.json").write_text("{")
    with pytest.raises(UserError, match="none is remembered"):
        settled("--model", "m")
    assert "is left aside" in capsys.readouterr().err


def test_a_remembered_name_means_the_remembered_weights() -> None:
    keep()
    assert settled().fingerprint == "cd" * 32
    assert settled("--model", "brook").fingerprint == "cd" * 32
    assert settled("--model", "other").fingerprint == ""


def test_files_say_themselves_which_weights_they_are(place: Path) -> None:
    (place / "there" / "brook").mkdir(parents=True)
    keep(str(place / "there" / "brook"))
    read = settled()
    assert (read.model, read.fingerprint) == (str(place / "there" / "brook"), "")


def test_an_invitation_names_no_file_here(place: Path) -> None:
    (place / "brook").mkdir()
    (place / "org").mkdir()
    (place / "org" / "name").mkdir()
    for text in (BARE, INVITATION):
        with pytest.raises(UserError, match="file here"):
            settled(text)
    assert settled(BARE, "--model", "./brook").fingerprint == SAID


def test_join_founds_only_where_it_is_told_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("org/name")
    founding = joined("--model", "org/mine", monkeypatch=monkeypatch)
    assert (founding.initial_peers, founding.network) == ([], "anabranch")
    again = joined(monkeypatch=monkeypatch)
    assert (again.initial_peers, again.network) == ([KEPT], "home")


def test_a_model_that_was_asked_or_is_invited_to_does_not_say_what_a_peer_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("org/name")
    (place / "brook").mkdir()
    for words, said in (((), "brook"), ((INVITATION,), "org/name"), ((BARE,), "brook")):
        read = joined(*words, monkeypatch=monkeypatch)
        assert (read.model, read.model_name, read.fingerprint) == ("", None, "")
        assert read.said_model == said, "but it vouches for the model of that name"
        assert read.said_fingerprint


def test_a_peer_that_comes_back_serves_what_it_served(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("org/asked")
    key = place / "own.key"
    spec = replace(MODEL, name="brook")
    served = argparse.Namespace(identity=key, network="home", model="org/served")
    remember_served(served, spec, Reporter(json_log=False))
    read = joined("--identity", str(key), monkeypatch=monkeypatch)
    assert (read.model, read.model_name) == ("org/served", "brook")
    assert (read.fingerprint, read.initial_peers) == (spec.fingerprint, [KEPT])
    for words in ((INVITATION,), ("--models", "org/a", "org/b"), ("--initial-peers", TYPED)):
        read = joined("--identity", str(key), *words, monkeypatch=monkeypatch)
        assert read.model == "", "it looks where it is needed"
    assert joined("--identity", str(place / "other.key"), monkeypatch=monkeypatch).model == ""
    elsewhere = argparse.Namespace(**{**vars(served), "network": "lab"})
    remember_served(elsewhere, spec, Reporter(json_log=False))
    assert joined("--identity", str(key), monkeypatch=monkeypatch).model == ""
    gone = argparse.Namespace(**{**vars(served), "model": str(place / "gone")})
    remember_served(gone, spec, Reporter(json_log=False))
    with pytest.raises(UserError, match="no longer here"):
        joined("--identity", str(key), monkeypatch=monkeypatch)


def test_from_a_directory_join_serves_what_the_invitation_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "copy").mkdir()
    read = joined(INVITATION, "--model", "copy", monkeypatch=monkeypatch)
    assert (read.model, read.model_name, read.fingerprint) == ("copy", "org/name", SAID)


def test_local_takes_what_is_offered_here_and_shows_it_first(
    offers: list[Offer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep()
    monkeypatch.setenv("ANABRANCH_PEERS", TYPED)
    offers.append(an_offer())
    read = settled("--local")
    assert (read.initial_peers, read.network) == ([NAMED], "lab")
    assert (read.model, read.fingerprint, read.recalled) == ("brook", SAID, False)
    assert capsys.readouterr().err.splitlines() == [
        "looking on this network for peers that joined with --local…",
        "pc: brook (fingerprint abababababababab…), network lab, 10.0.0.3:1",
        "network lab, model brook, as offered here",
    ]
    with pytest.raises(UserError, match="not both"):
        settled("--local", INVITATION)
    with pytest.raises(UserError, match="other weights"):
        settled("--local", "--model", "brook", "--fingerprint", "f" * 32)


def test_nothing_is_looked_for_unasked(offers: list[Offer]) -> None:
    offers.append(an_offer())
    with pytest.raises(UserError, match="which network"):
        settled()


def test_local_says_where_nobody_or_more_than_one_is_found(
    offers: list[Offer], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep()
    with pytest.raises(NetworkError, match="join --local"):
        settled("--local")
    offers += [an_offer(), an_offer("other")]
    with pytest.raises(NetworkError, match="nobody of network 'third'"):
        settled("--local", "--network", "third")
    with pytest.raises(UserError, match="several offers"):
        settled("--local")
    assert settled("--local", "--network", "other").network == "other"
    (place / "brook").mkdir()
    with pytest.raises(UserError, match="file here"):
        settled("--local", "--network", "other")
    capsys.readouterr()
    offers += [an_offer(f"n{number}") for number in range(100)]
    with pytest.raises(NetworkError):
        settled("--local", "--network", "n99")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == LOCAL_NETWORK.offers_max + 2
    assert said[-1] == f"… and {102 - LOCAL_NETWORK.offers_max} more, which are left aside"


def test_join_local_founds_where_nobody_is_found(
    offers: list[Offer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    founding = joined("--local", "--model", "org/mine", monkeypatch=monkeypatch)
    assert (founding.initial_peers, founding.network) == ([], "anabranch")
    assert "was started with --local: this peer founds a network" in capsys.readouterr().err
    offers += [an_offer(model="org/name"), an_offer(model="org/other")]
    joining = joined("--local", "--model", "org/name", monkeypatch=monkeypatch)
    assert (joining.initial_peers, joining.network, joining.fingerprint) == ([NAMED], "lab", SAID)
    for words in ((), ("--models", "org/name", "org/other")):
        neediest = joined("--local", *words, monkeypatch=monkeypatch)
        assert (neediest.initial_peers, neediest.model) == ([NAMED], "")
        assert neediest.said_model == "", "several are offered"
    del offers[1:]
    assert joined("--local", monkeypatch=monkeypatch).said_fingerprint == SAID
    invited = joined("--local", INVITATION, monkeypatch=monkeypatch)
    assert invited.initial_peers == [INVITED]
