"""The health page: state from records, hostile words, headers, history over restarts."""

import asyncio
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from client import Swarm, SwarmConfig
from client.health import app
from client.health.app import Page, metrics_text
from client.health.badge import badge_words
from client.health.drawing import flow_drawing, use_kind
from client.health.history import KEPT_S, History
from client.health.prober import Prober, ProberConfig
from client.health.state import (
    Probe,
    SeenPeer,
    SwarmSnapshot,
    TokenTime,
    aged,
    build_state,
)
from client.health.words import COLUMNS, told
from client.pages.clean import clean_name, names_in, without_links
from client.pages.fixed import CSP, SHARED
from client.status import screen
from client.text.tokenizer import ModelText
from coordinator.policies.failure.pinger import BY_CLIENTS
from dht.errors import NetworkError
from dht.messages.types import (
    Assignment,
    DeviceSpec,
    FlowEdge,
    LeaseRecord,
    Link,
    LinksRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanVersion,
    Reach,
    RouteStage,
)
from dht.process.json_file import Json
from dht.process.supervision import Supervisor
from testing import paper_health
from testing.network import MemoryNetwork

NOW_S = 1_800_000_000.0
SILENT = BY_CLIENTS.silent_misses
MODEL = ModelSpec(
    name="brook",
    root="f",
    layers=8,
    layer_bytes=1 << 30,
    embed_bytes=0,
    head_bytes=0,
    kv_bytes_per_token_layer=1024,
    activation_bytes=64,
    context_tokens=1024,
    vocab=512,
)
PAYLOADS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</td></table><iframe src=//x>",
    "{{ 7*7 }}{% raw %}",
    "</title><script>x",
    "--><b onclick=x>",
    "\x00<a href=javascript:x>",
    "&lt;script&gt;",
)


def peer(number: int, start: int, end: int, **named: object) -> SeenPeer:
    record = NodeRecord(
        peer_id=f"12D3Peer{number}",
        name=f"peer {number}",
        software_version="0.1.0",
        device=DeviceSpec(kind="cuda", name="RTX 3060", memory_bytes=12 << 30),
        model=MODEL,
        memory_bytes=8 << 30,
        kv_tokens_min=1024,
        tokens_per_s=(80.0, 40.0, 30.0, 20.0, 10.0, 9.0, 8.0, 7.0),
        state=NodeState.SERVING,
        start=start,
        end=end,
        addresses=("/ip4/203.0.113.7/tcp/31337/p2p/12D3",),
        joined_unix_s=NOW_S - 7200,
    )
    of_page = (
        "misses",
        "refused_unix_s",
        "placed_unix_s",
        "seen_unix_s",
        "answered_unix_s",
    )
    seen: dict[str, object] = {"seen_unix_s": NOW_S, "answered_unix_s": NOW_S - 2}
    seen |= {name: named.pop(name) for name in of_page if name in named}
    return SeenPeer(record=replace(record, **named), rtt_s=0.02, **seen)  # type: ignore[arg-type]


def state_of(
    *peers: SeenPeer, probe: str = "", plan: Plan | None = None, model: ModelSpec = MODEL
) -> Json:
    last = Probe(at_unix_s=NOW_S - 5, reason=probe, ttft_s=0.2, tpot_s=0.05, tokens=8)
    lease = LeaseRecord(peer_id="12D3Peer0", term=3, expires_unix_s=NOW_S + 10)
    return build_state(
        SwarmSnapshot(
            model_name="brook",
            now_unix_s=NOW_S,
            model=model,
            peers=peers,
            leases=(lease,),
            plan=plan,
            probes=(last,),
        )
    )


def test_every_layer_held_and_the_probe_answered_is_healthy() -> None:
    state = state_of(peer(0, 0, 8), peer(1, 0, 3), peer(2, 5, 8))
    assert state["swarm"]["healthy"]
    assert state["swarm"]["sentence"].startswith(
        "Healthy, but fragile: every layer is on at least 1 of 3 serving peers"
    )
    assert state["swarm"]["verdict"] == "healthy, but fragile"
    assert state["layers"]["single_points_of_failure"] == [3, 4]
    assert state["help"].startswith("Layers 3-4 have one holder: one more peer of 2.0 GiB")
    assert state["coordinator"] == {"id": "12D3Peer0", "name": "peer 0", "term": 3}
    assert state["probes"]["ttft_p50_s"] == 0.2


def test_who_cannot_be_reached_is_told_why_it_has_no_layers() -> None:
    shown = state_of(peer(0, 0, 8), peer(1, 0, 0, reach=Reach.NONE), peer(2, 0, 0))["peers"]
    assert [each["via"] for each in shown] == ["unknown", "nobody", "unknown"]
    assert ["reach" in each["why_idle"] for each in shown] == [False, True, False]


def test_identities_that_sort_first_hide_no_peer_that_answers() -> None:
    """A thousand ids that sort before all others were the only ones that were counted."""
    crowd = [peer(number, 0, 8, peer_id=f"12D3A{number:04}") for number in range(1200)]
    silent = [replace(each, answered_unix_s=None, misses=2) for each in crowd]
    own = [peer(number, 0, 8) for number in range(2)]
    state = state_of(*silent, *own)
    assert state["swarm"]["serving"] == 2
    assert state["swarm"]["healthy"]
    assert len(state["peers"]) == 1000
    shown = {each["id"] for each in state_of(*own, *crowd)["peers"]}
    assert shown >= {each.record.peer_id for each in own}, "they were seen before"


def test_a_lost_layer_says_which() -> None:
    state = state_of(peer(0, 0, 3), peer(1, 4, 8))
    assert state["swarm"]["reasons"] == ["layer 3 is held by nobody that answers"]
    assert state["layers"]["lost"] == [3]
    assert "would bring it back" in state["help"]


def test_layers_that_are_being_loaded_are_told_apart() -> None:
    loading = [peer(n, 3, 8, state=NodeState.LOADING) for n in (1, 2)]
    silent = peer(3, 0, 3, state=NodeState.LOADING, misses=SILENT)
    state = state_of(*loading, silent, peer(4, 0, 1))
    assert state["swarm"]["reasons"] == [
        "layers 1-2 are held by nobody that answers; layers 3-7 are being loaded by 2 peers"
    ]
    assert [each["tokens_per_s"] for each in state["peers"][:2]] == [0.0, 0.0]
    one = state_of(peer(0, 0, 7), peer(1, 7, 8, state=NodeState.LOADING))
    assert one["swarm"]["reasons"] == ["layer 7 is being loaded by 1 peer"]


def test_a_ghost_does_not_count_but_one_lost_ping_is_none() -> None:
    state = state_of(peer(0, 0, 4), peer(1, 4, 8, misses=SILENT))
    assert state["peers"][1]["flags"] == ["ghost"]
    assert state["layers"]["lost"] == [4, 5, 6, 7]
    assert "not answering: peer 1" in state["swarm"]["sentence"]
    assert state_of(peer(0, 0, 4), peer(1, 4, 8, misses=SILENT - 1))["swarm"]["healthy"]


def test_a_record_alone_is_no_sign_of_life() -> None:
    def of(**named: object) -> tuple[str, bool]:
        (shown,) = state_of(peer(0, 0, 8, **named))["peers"]
        return shown["state"], shown["counts"]

    draining = NodeState.DRAINING
    assert of() == ("serving", True)
    assert of(misses=SILENT - 1) == ("serving", True), "some pings may be lost"
    assert of(misses=SILENT) == ("silent", False)
    assert of(answered_unix_s=NOW_S - 31) == ("silent", False), "the page's pings hang"
    assert of(answered_unix_s=None) == ("unknown", False)
    assert of(answered_unix_s=None, misses=SILENT) == ("silent", False)
    assert of(state=draining) == ("draining", False)
    assert of(state=draining, misses=SILENT) == ("gone", False), "it said that it leaves"
    state = state_of(peer(0, 0, 8), peer(1, 0, 8, misses=SILENT, answered_unix_s=NOW_S - 9))
    assert state["swarm"]["sentence"].endswith(" 1 more does not answer.")
    assert [each["answered_s"] for each in state["peers"]] == [2.0, 9.0]
    page = Page(lambda: {}).render(state)
    assert "not answering" in page
    assert "9 s ago" in page


def test_before_the_first_request_nothing_is_claimed() -> None:
    seen = SwarmSnapshot(model_name="brook", now_unix_s=NOW_S, model=MODEL, peers=(peer(0, 0, 8),))
    state = build_state(seen)
    assert not state["swarm"]["healthy"]
    assert state["swarm"]["sentence"] == "Not known: the page has only begun to look."
    page = Page(lambda: {}).render(state)
    assert "<h1>Not known</h1>" in page


def test_a_plans_bottleneck_is_not_drawn_as_a_fault() -> None:
    assert use_kind(1.0) == "full", "a plan of maximum flow fills something"
    css = (Path(app.__file__).parent / "static" / "page.css").read_text("utf-8")
    for rule in re.findall(r"[^{}]*\.full[^{}]*\{[^}]*\}", css):
        assert "--bad" not in rule, "red is for what is wrong"


def test_the_page_has_the_chats_mark_name_and_colours() -> None:
    client = Path(app.__file__).parents[1]
    base = (SHARED / "base.css").read_text("utf-8")
    shared = set(re.findall(r"(--\w+):", base))
    assert base.count("--river:") == 2, "in light and dark"
    for html, css in (
        (client / "health/templates/page.html", client / "health/static/page.css"),
        (client / "gateway/static/chat.html", client / "gateway/static/chat.css"),
    ):
        page, styles = html.read_text("utf-8"), css.read_text("utf-8")
        assert '<p class="brand"><span>anabranch</span></p>' in page
        assert page.index("static/base.css") < page.index(f"static/{css.name}")
        assert not shared & set(re.findall(r"(--\w+):", styles)), "a colour is said once"


def test_a_peer_that_refuses_what_it_announces_lies() -> None:
    twice = (NOW_S - 60, NOW_S - 30)
    state = state_of(peer(0, 0, 8), peer(1, 0, 8, refused_unix_s=twice))
    assert [each["flags"] for each in state["peers"]] == [[], ["lying"]]
    moved = peer(1, 0, 8, refused_unix_s=twice, placed_unix_s=NOW_S - 65)
    assert state_of(moved)["peers"][0]["flags"] == [], "its record may lag"
    saying = peer(1, 0, 8, refused_unix_s=twice, moved_unix_s=NOW_S, joined_unix_s=NOW_S)
    assert state_of(saying)["peers"][0]["flags"] == ["lying"], "its own word does not count"
    beyond = peer(2, 0, 9)
    state = state_of(peer(0, 0, 8), peer(1, 0, 8), beyond)
    assert state["peers"][2]["flags"] == ["lying"]


def test_a_column_has_one_label_on_wide_and_narrow_pages() -> None:
    state = state_of(peer(0, 0, 8))
    page = Page(lambda: {}).render(state)
    table = page[page.index('<table class="peers">') :]
    table = table[: table.index("</table>")]
    labels = [column.label for column in COLUMNS]
    assert re.findall("<th>(.*?)</th>", table) == labels
    assert re.findall('data-label="(.*?)"', table) == labels[1:], "the name needs none"
    cells = re.findall("<td.*?>(.*?)</td>", table)
    assert cells == [column.text(state["peers"][0]) for column in COLUMNS]


def test_a_record_that_two_looks_did_not_find_is_gone() -> None:
    peers = [peer(number, 0, 8, seen_unix_s=NOW_S - age_s) for number, age_s in enumerate((24, 26))]
    state = state_of(*peers)
    assert [each["record_there"] for each in state["peers"]] == [True, False]
    page = Page(lambda: {}).render(state)
    assert re.findall('data-label="Record">(.*?)<', page) == ["there", "gone for 26 s"]


def test_people_are_told_what_a_peer_does_and_not_what_it_is_called() -> None:
    twice = (NOW_S - 60, NOW_S - 30)
    peers = [peer(0, 0, 8), peer(1, 0, 8, refused_unix_s=twice), peer(2, 0, 8, misses=SILENT)]
    peers += [
        peer(3, 0, 8, misses=SILENT, refused_unix_s=twice),
        peer(4, 0, 8, answered_unix_s=None),
    ]
    state = state_of(*peers)
    words = "announces layers that it does not answer for"
    assert [told(each) for each in state["peers"]] == [
        ("serving", ""),
        ("serving", words),
        ("not answering", ""),
        ("not answering", words),
        ("not asked yet", ""),
    ]
    flags = [each["flags"] for each in state["peers"]]
    assert flags == [[], ["lying"], ["ghost"], ["ghost", "lying"], []], "for programs"
    page, seen = Page(lambda: {}).render(state), screen(state, "home")
    for shown in (page, seen):
        assert not re.search("ghost|lying|liar|silent", shown)
        assert shown.count(words) == 2
        assert shown.count("not asked yet") >= 1
    assert max(map(len, seen.split("\n\n")[1].splitlines())) <= 80
    assert sum(" 0–7 " in line for line in seen.splitlines()) == 5


def test_old_records_nobody_and_a_failed_probe_are_not_healthy() -> None:
    assert state_of(peer(0, 0, 8, seen_unix_s=NOW_S - 61))["peers"][0]["state"] == "gone"
    for state in (state_of(), state_of(peer(0, 0, 8, seen_unix_s=NOW_S - 61))):
        assert state["swarm"]["reasons"] == ["nobody announces this model"]
        assert "Not healthy" in Page(lambda: {}).render(state)
    failed = state_of(peer(0, 0, 8), probe="no answer within 20 s")
    assert "no answer within 20 s" in failed["swarm"]["sentence"]


async def test_a_page_that_reaches_nobody_does_not_say_that_nobody_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, cut = NOW_S, False
    transport = MemoryNetwork(random.Random(0)).transport()
    monkeypatch.setattr(transport, "now", lambda: now_s)
    swarm = Swarm(transport, ModelText(name=MODEL.name), SwarmConfig())
    history = History(None)
    prober = Prober(swarm, history, ProberConfig())
    record = replace(peer(0, 0, 8).record, peer_id=transport.peer_id)

    async def nodes() -> dict[str, NodeRecord]:
        if cut:
            raise NetworkError("no full peer answers")
        return {record.peer_id: record}

    monkeypatch.setattr(prober._directory, "nodes", nodes)
    await history.add(Probe(at_unix_s=now_s, reason="no route"))

    async def said() -> Json:
        swarm.view.take_nodes({record.peer_id: record})
        await prober._look()
        await prober.show()
        shown: Json = prober.state
        return shown

    assert (await said())["swarm"]["verdict"] == "not healthy"
    now_s, cut = now_s + 120.0, True
    state = await said()
    assert state["swarm"]["verdict"] == "not known"
    assert not state["swarm"]["healthy"]
    assert "may be cut off itself" in state["swarm"]["sentence"]
    assert "Nobody serves" not in state["help"]
    assert "unknown" in badge_words(state)
    await prober._pinger.close()
    history.close()


def test_500_peers_are_all_on_the_page() -> None:
    peers = [peer(number, number % 4 * 2, number % 4 * 2 + 2) for number in range(500)]
    state = state_of(*peers)
    assert state["layers"]["replica_depth"] == 125
    assert Page(lambda: {}).render(state).count("<td>peer ") == 500


def linked(number: int, to: int, bandwidth: float, author: int | None = None) -> LinksRecord:
    link = Link(
        source=f"12D3Peer{number}",
        target=f"12D3Peer{to}",
        bandwidth_bytes_per_s=bandwidth,
        rtt_s=0.03,
        measured_unix_s=NOW_S - 50,
    )
    return LinksRecord(peer_id=f"12D3Peer{to if author is None else author}", links=(link,))


def test_flow_is_held_against_what_links_and_peers_can_carry() -> None:
    peers = (peer(0, 0, 4), peer(1, 4, 8))
    plan = Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator="12D3Peer0",
        model=MODEL,
        assignments=(
            Assignment(peer_id="12D3Peer0", start=0, end=4),
            Assignment(peer_id="12D3Peer1", start=4, end=8),
        ),
        edges=(
            FlowEdge(tail="source", head="12D3Peer0", tokens_per_s=10.0),
            FlowEdge(tail="12D3Peer0", head="12D3Peer1", tokens_per_s=10.0),
            FlowEdge(tail="12D3Peer1", head="sink", tokens_per_s=10.0),
        ),
        flow_tokens_per_s=10.0,
        estimate_tokens_per_s=6.5,
        bound_tokens_per_s=20.0,
        planner="test",
        solve_s=0.1,
        created_unix_s=NOW_S,
    )
    route = tuple(RouteStage(peer_id=f"12D3Peer{n}", start=4 * n, end=4 * n + 4) for n in (0, 1))
    state = build_state(
        SwarmSnapshot(
            model_name="brook",
            now_unix_s=NOW_S,
            model=MODEL,
            peers=peers,
            links=(linked(0, 1, 1280.0), linked(1, 0, 99.0, author=7)),
            plan=plan,
            route=route,
            token_time=TokenTime(computed_s=0.01, waited_s=0.002, way_s=0.03),
        )
    )
    assert state["token_time"] == {"computed_s": 0.01, "waited_s": 0.002, "way_s": 0.03}
    assert [link["from"] for link in state["links"]] == ["12D3Peer0"], "a stranger measured nothing"
    assert state["plan"]["capacity_tokens_per_s"] == 6.5, "not the flow, which serves nobody"
    inner = state["plan"]["edges"][1]
    assert inner["capacity_tokens_per_s"] == 20.0  # 1280 bytes/s over 64 bytes a token
    assert inner["use"] == 0.5
    assert state["plan"]["edges"][0]["use"] is None
    assert [each["use"] for each in state["plan"]["assignments"]] == [0.5, 0.5]
    assert [stage["link_rtt_s"] for stage in state["trace"]] == [0.03, None]
    assert state["peers"][0]["links"]["count"] == 1
    drawn = flow_drawing(state["plan"], {}, {"12D3Peer0"})
    assert drawn is not None
    assert drawn["away"] == 1
    assert [box["away"] for box in drawn["boxes"]] == [False, True]
    assert "not answering" in drawn["boxes"][1]["text"]
    assert {line["kind"] for line in drawn["lines"]} == {"calm", "unknown"}
    assert "10.0 of 20 tokens/s" in drawn["boxes"][0]["text"]


def test_where_layers_are_held_twice_the_narrowest_ask_for_help() -> None:
    peers = [peer(n, 0, 4) for n in range(4)] + [peer(n, 4, 8) for n in (4, 5)]
    state = state_of(*peers)
    assert state["help"] == (
        "Answers wait for layers 4-7: two peers hold them (peer 4 and peer 5), 40 tokens/s"
        " together; one more peer like peer 0 there gives +50%."
    )
    assert "Without peer 4, 50% less gets through." in state["weak_points"]
    assert state["help"] in screen(state, "home")
    assert state["weak_points"][0] in screen(state, "home")
    assert state_of(*peers[:2], *peers[4:])["help"].startswith("All layers are equally narrow")


def test_whose_loss_stops_answers_is_said_on_the_page() -> None:
    peers = [peer(0, 0, 4), peer(1, 0, 4), peer(2, 4, 8, name="<b>birch</b>")]
    state = state_of(*peers)
    said = "Without <b>birch</b>, layers 4-7 have no holder, and answers stop."
    assert said in state["weak_points"]
    page = Page(lambda: state).render(state)
    assert "Without &lt;b&gt;birch&lt;/b&gt;, layers 4-7" in page
    assert "<b>birch" not in page


def test_who_is_not_believed_carries_nothing() -> None:
    peers = [peer(0, 0, 8), peer(1, 0, 8, misses=SILENT), peer(2, 0, 8, tokens_per_s=())]
    assert any("Without peer 0" in each for each in state_of(*peers)["weak_points"])
    assert state_of(peer(0, 0, 4))["weak_points"] == [], "what is lost is said first"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


def hostile(text: str) -> str:
    """The page with ``text`` wherever a peer or a plan's author chooses words."""
    model = replace(MODEL, name=text)
    plan = Plan(
        version=PlanVersion(term=1, counter=1),
        coordinator=text,
        model=model,
        assignments=(Assignment(peer_id=text, start=0, end=8),),
        edges=(FlowEdge(tail="source", head=text, tokens_per_s=5.0),),
        flow_tokens_per_s=5.0,
        bound_tokens_per_s=5.0,
        planner=text,
        solve_s=0.1,
        created_unix_s=NOW_S,
    )
    device = DeviceSpec(kind=text[:16], name=text, memory_bytes=1)
    bad = peer(0, 0, 8, peer_id=text, name=text, software_version=text, device=device, model=model)
    return Page(lambda: {}).render(state_of(bad, plan=plan, model=model))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_tag_or_attribute_comes_from_a_peer(payload: str) -> None:
    calm, attacked = Tags(), Tags()
    calm.feed(hostile("plain"))
    attacked.feed(hostile(payload))
    assert attacked.seen == calm.seen


def test_a_name_without_a_link_is_passed_once() -> None:
    """4,097 names of 128 letters took 0.9 s, whenever they were shown."""
    assert without_links("a" * 1_000_000 + " b://c") == "a" * 1_000_000 + " *c"
    assert without_links("1a://b //c www.d") == "1a:*b *c *d"


def test_names_are_short_printable_and_no_addresses() -> None:
    for text in ("10.1.2.3", "fe80::1", "2001:db8:0:0:1:2:3:4"):
        assert clean_name(f"at {text}!") == "at *!"
    assert "//" not in clean_name("https://example.org/x")
    assert len(clean_name("x" * 128)) == 32
    assert clean_name("\u202e\u0000\n") == "unnamed"
    nameless = [peer(n, 0, 8, name="", peer_id=f"12D3KooWnobody{n}") for n in (0, 1)]
    state = state_of(*nameless)
    assert [each["name"] for each in state["peers"]] == ["peer Wnobody0", "peer Wnobody1"]


def test_peers_of_one_name_are_told_apart_wherever_they_are_named() -> None:
    twins = [peer(n, 0, 8, name=name) for n, name in enumerate(("vm", "vm ", "oak"))]
    state = state_of(*twins)
    names = ["vm 2D3Peer0", "vm 2D3Peer1", "oak"]
    assert [each["name"] for each in state["peers"]] == names
    assert state["coordinator"]["name"] == names[0]
    assert names_in({each.record.peer_id: each.record for each in twins[1:]}) == {
        "12D3Peer1": "vm",
        "12D3Peer2": "oak",
    }


def test_the_server_sends_a_strict_policy_and_no_address() -> None:
    async def ask() -> None:
        state = state_of(peer(0, 0, 8, name="203.0.113.7"))
        async with TestClient(TestServer(Page(lambda: state).app)) as client:
            paths = ("/", "/api/v1/state", "/health", "/metrics", "/static/page.js", "/none")
            for path in paths:
                response = await client.get(path)
                assert response.status == (404 if path == "/none" else 200)
                assert response.headers["Content-Security-Policy"] == CSP
                assert "203.0.113.7" not in await response.text()
            api = await (await client.get("/api/v1/state")).read()
            assert json.loads(api) == state

    asyncio.run(ask())
    parts = Supervisor()
    parts.note("Prober._states", OSError())
    text = metrics_text(state_of(peer(0, 0, 8)), parts)
    assert b'anabranch:swarm_healthy{model_name="brook"} 1.0' in text
    assert b'anabranch:part_failures_total{part="Prober._states"} 1.0' in text


async def test_looks_at_an_old_state_render_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state, now_s, rendered = state_of(peer(0, 0, 8)), [NOW_S], []
    page = Page(lambda: aged(state, now_s[0], 60.0))
    render = page.render

    def counted(shown: Json) -> str:
        rendered.append(shown)
        return render(shown)

    monkeypatch.setattr(page, "render", counted)
    async with TestClient(TestServer(page.app)) as client:
        for now_s[0], count in ((NOW_S, 1), (NOW_S + 300, 2), (NOW_S + 301, 3)):
            for _ in range(3):
                await client.get("/")
            assert len(rendered) == count


async def test_history_survives_a_restart_and_is_trimmed(tmp_path: Path) -> None:
    for at_s in (NOW_S - KEPT_S - 1, NOW_S - 10, NOW_S):
        history = History(tmp_path / "health.sqlite")
        await history.add_plan(paper_health.plan([paper_health.record(0, 0, 32)]), at_s)
        await history.add(Probe(at_unix_s=at_s, ttft_s=0.1, tpot_s=0.01, tokens=8))
        history.close()
    history = History(tmp_path / "health.sqlite")
    kept = await history.recent(NOW_S, 10 * KEPT_S)
    assert [each.at_unix_s for each in kept] == [NOW_S - 10, NOW_S]
    for past in await history.past(NOW_S):
        assert sum(step["tokens"] for step in past.probes) == 16
    assert [(each["version"], each["seen_unix_s"]) for each in await history.plans()] == [
        ("7.12", NOW_S)
    ], "seen once since the older row was trimmed"
    history.close()


def test_a_state_that_nobody_renewed_is_not_called_healthy() -> None:
    state = build_state(SwarmSnapshot(model_name="brook", now_unix_s=NOW_S))
    state["swarm"].update(healthy=True, reasons=[], sentence="Healthy")
    assert aged(state, NOW_S + 100, 120.0) is state
    renewed = {**state, "generated_unix_s": NOW_S + 300}
    renewed["probes"] = {**state["probes"], "last": {"at_unix_s": NOW_S, "ok": True, "reason": ""}}
    assert aged(renewed, NOW_S + 300, 120.0)["swarm"]["verdict"] == "not known", "requests stopped"
    old = aged(state, NOW_S + 300, 120.0)
    assert not old["swarm"]["healthy"]
    assert old["swarm"]["reasons"] == ["nothing was measured for 300 s: what is shown is that old"]
    assert state["swarm"]["healthy"]
    assert "Nothing was measured for 300 s" in Page(lambda: {}).render(old)


def test_absurd_records_neither_raise_nor_leave_json() -> None:
    """Whatever the wire allows in rates, spans, times, terms and links, beside one honest peer."""
    rng = random.Random(7)
    rates = (0.0, 5e-324, 1e-300, 1.0, 1e15)
    times = (0.0, NOW_S, 1e10)
    for _ in range(200):
        absurd = [
            peer(
                number,
                rng.choice((0, 8, 1024)),
                rng.choice((0, 8, 1024)),
                tokens_per_s=(rng.choice(rates),) * rng.choice((0, 8, 1024)),
                joined_unix_s=rng.choice(times),
                moved_unix_s=rng.choice(times),
                answers=1 << 50,
                answer_tokens=1 << 50,
                sessions=1 << 50,
                memory_bytes=1 << 50,
                addresses=("\x00", "/dns4/" + "a" * 200),
            )
            for number in range(1, 5)
        ]
        names = [each.record.peer_id for each in absurd]
        links = tuple(
            LinksRecord(
                peer_id=name,
                links=(
                    Link(
                        source="12D3Peer0",
                        target=name,
                        bandwidth_bytes_per_s=rng.choice(rates),
                        rtt_s=rng.choice((0.0, 1e10)),
                        measured_unix_s=rng.choice(times),
                    ),
                ),
            )
            for name in names
        )
        plan = Plan(
            version=PlanVersion(term=1, counter=1),
            coordinator="12D3Peer0",
            model=MODEL,
            assignments=tuple(Assignment(peer_id=name, start=0, end=8) for name in names),
            edges=tuple(
                FlowEdge(tail="12D3Peer0", head=name, tokens_per_s=rng.choice(rates))
                for name in names
            ),
            flow_tokens_per_s=1e15,
            bound_tokens_per_s=1e15,
            planner="x" * 128,
            solve_s=0.0,
            created_unix_s=1e10,
        )
        state = build_state(
            SwarmSnapshot(
                model_name="brook",
                now_unix_s=NOW_S,
                model=MODEL,
                peers=(peer(0, 0, 8), *absurd),
                links=links,
                leases=(
                    LeaseRecord(peer_id="12D3Peer0", term=3, expires_unix_s=NOW_S + 10),
                    LeaseRecord(peer_id=names[0], term=1 << 48, expires_unix_s=1e10),
                ),
                plan=plan,
                probes=(Probe(at_unix_s=NOW_S - 5, ttft_s=0.2, tpot_s=0.05, tokens=8),),
                route=(RouteStage(peer_id=names[0], start=0, end=8),),
            )
        )
        assert json.loads(json.dumps(state, allow_nan=False))["swarm"]["healthy"]
        assert state["coordinator"]["id"] == "12D3Peer0", "no honest term is that high"
