"""What a peer concludes from what others found, and what liars among them can do."""

from dht.messages.peer import ReachAnswer
from dht.messages.types import Reach
from node.links.dial_back_findings import Findings, FindingsConfig

CONFIG = FindingsConfig()

PUBLIC = "8.8.4.4"


def said(reached: bool | None, host: str = PUBLIC) -> ReachAnswer:
    return ReachAnswer(reached=reached, host=host)


def found(*words: bool | None, relayed: bool = False, findings: Findings | None = None) -> Reach:
    """What follows when peers a, b, c … say these words."""
    findings = findings or Findings()
    for name, word in zip("abcdefgh", words, strict=False):
        findings.note(name, said(word), 0.0)
    return findings.conclude(0.0, relayed=relayed)


def test_nothing_follows_from_nobody() -> None:
    assert found() is Reach.UNKNOWN
    assert found(None, None) is Reach.UNKNOWN
    assert found(relayed=True) is Reach.UNKNOWN, "a relay alone says nothing of the port"


def test_who_gets_through_once_is_believed() -> None:
    assert found(True) is Reach.DIRECT
    assert found(False, True) is Reach.DIRECT
    assert found(False, False, True) is Reach.DIRECT
    assert found(True, relayed=True) is Reach.DIRECT


def test_several_must_fail_before_a_peer_is_closed() -> None:
    assert found(False) is Reach.UNKNOWN
    assert found(False, False) is Reach.NONE
    assert found(False, relayed=True) is Reach.RELAYED, "a relay does no harm"
    assert found(False, False, relayed=True) is Reach.RELAYED


def test_one_liar_closes_nobody_however_often_it_lies() -> None:
    findings = Findings()
    for now_s in range(50):
        findings.note("liar", said(False), now_s)
        assert findings.conclude(now_s, relayed=False) is Reach.UNKNOWN
    findings.note("honest", said(True), 50.0)
    for now_s in range(51, 100):
        findings.note("liar", said(False), now_s)
        assert findings.conclude(now_s, relayed=False) is Reach.DIRECT


def test_one_liar_opens_nobody_that_others_find_closed() -> None:
    findings = Findings()
    assert found(False, False, False, findings=findings) is Reach.NONE
    for now_s in range(1, 50):
        findings.note("liar", said(True), now_s)
        assert findings.conclude(now_s, relayed=False) is Reach.NONE
    assert found(True, False, False, False) is Reach.NONE, "nor when it was there from the start"


def test_a_closed_peer_returns_when_several_get_through() -> None:
    findings = Findings()
    assert found(False, False, findings=findings) is Reach.NONE
    assert found(True, findings=findings) is Reach.NONE, "one of two"
    assert found(True, True, findings=findings) is Reach.DIRECT
    # From then on one failure changes nothing.
    findings.note("c", said(False), 1.0)
    assert findings.conclude(1.0, relayed=False) is Reach.DIRECT


def test_the_newest_words_count() -> None:
    findings = Findings()
    for number in range(2 * CONFIG.newest):
        findings.note(f"old{number}", said(True), 0.0)
    assert findings.conclude(0.0, relayed=False) is Reach.DIRECT
    for number in range(CONFIG.newest):
        findings.note(f"new{number}", said(False), 1.0)
    assert findings.conclude(1.0, relayed=False) is Reach.NONE
    assert findings.conclude(1.0 + CONFIG.kept_s, relayed=False) is Reach.NONE, (
        "silence opens nobody"
    )


def test_neighbours_count_only_where_nobody_looked_from_outside() -> None:
    findings = Findings()
    findings.note("near", said(True, "192.168.1.5"), 0.0)
    assert findings.conclude(0.0, relayed=False) is Reach.DIRECT
    findings.note("far", said(False), 0.0)
    findings.note("farther", said(False), 0.0)
    assert findings.conclude(0.0, relayed=False) is Reach.NONE


def test_the_host_is_what_most_of_those_who_got_through_saw() -> None:
    findings = Findings()
    assert findings.host == ""
    findings.note("near", said(True, "192.168.1.5"), 0.0)
    assert findings.host == "", "an address of a local network is no use elsewhere"
    findings.note("liar", said(True, "9.9.9.9"), 0.0)
    for name in "ab":
        findings.note(name, said(True), 0.0)
    findings.note("c", said(False, "1.1.1.1"), 0.0)
    assert findings.host == PUBLIC
