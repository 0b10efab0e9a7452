"""What the demo says of peers while its swarm comes up."""

from typing import Any

from bench.demo.starting import phase_of, settled


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, "unix_s": 0.0, **fields}


def test_each_phase_has_words_that_say_what_is_waited_for() -> None:
    events: list[dict[str, Any]] = []
    said = [phase_of(events)]
    for each in (
        event("listening", peer_id="a"),
        event("measured"),
        event("no_plan", reason="8 layers are missing"),
        event("plan", assignments={}),
        event("assigned", start=0, end=5),
        event("serving", start=0, end=5),
        event("assigned", start=4, end=5),
        event("stays", start=0, end=5, reason="nobody else has shown to hold layer 0"),
        event("assigned", start=0, end=4),
    ):
        events.append(each)
        said.append(phase_of(events))
    assert said == [
        "starts",
        "measures this machine",
        "waits for a plan",
        "waits for a plan (8 layers are missing)",
        "waits for a plan",
        "loads layers 0-4",
        "serves layers 0-4",
        "loads layer 4",
        "serves layers 0-4; may not move to layer 4 yet",
        "loads layers 0-3",
    ]


def test_a_peer_that_serves_an_older_plan_is_not_settled() -> None:
    plan = event("plan", assignments={"a": [0, 5], "b": [5, 8]})
    a = [event("listening", peer_id="a"), plan, event("serving", start=0, end=5)]
    b = [event("listening", peer_id="b"), event("serving", start=5, end=8)]
    assert not settled([b]), "no plan is known"
    assert settled([a, b])
    c = [event("listening", peer_id="c"), event("measured")]
    assert not settled([a, b, c]), "the next plan has a place for it"
    a.append(event("plan", assignments={"a": [0, 4], "b": [4, 6], "c": [6, 8]}) | {"unix_s": 1.0})
    c.append(event("serving", start=6, end=8))
    assert not settled([a, b, c]), "all serve, but two of them will move"
    a.append(event("serving", start=0, end=4))
    b += [event("assigned", start=4, end=6), event("serving", start=4, end=6)]
    assert settled([a, b, c])
