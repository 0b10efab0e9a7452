"""The health page in a real browser: what it shows, and that no peer's words run."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from client.health.past import SPANS
from client.health.state import build_state
from dht.process.json_file import Json
from testing import paper_health
from testing.browser import PageServer
from tests.browser.conftest import HIT, contrast, findings

pytestmark = pytest.mark.browser

EVENTS = ("onload", "onerror", "onclick", "onmouseover", "onfocus", "ontoggle", "onbegin", "onend")
TAGS = ("svg", "img src=x", "body", "input autofocus", "details open", "video src=x", "math", "a")
SHAPES = ("<{tag} {event}=x()>", "'><{tag} {event}=x()>", '"><{tag} {event}=x()>')
SCRIPTS = (
    "<script>x()</script>",
    "</script><script>x()</script>",
    "</title><script>x()</script>",
    '" onmouseover="x()',
    "' onfocus='x()' autofocus='",
    "<iframe srcdoc='<script>x()'>",
    "<a href=javascript:x()>y</a>",
    "--><script>x()</script>",
)


def all_payloads() -> tuple[str, ...]:
    made = [shape.format(tag=t, event=e) for shape in SHAPES for t in TAGS for e in EVENTS]
    return (*SCRIPTS, *made[:: len(made) // 192])[:200]


PAYLOADS = all_payloads()
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
"""Opens all that the page folds, for what a test reads there."""


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer({}) as started:
        yield started


def look(opened: Any, server: PageServer, state: Json, **context: Any) -> Any:
    server.state = state
    page = opened.new_context(**context).new_page()
    page.goto(server.url)
    page.evaluate(UNFOLD)
    return page


def test_a_healthy_swarm_is_seen_at_one_look(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.healthy())
    assert page.inner_text("h1") == "Healthy"
    assert page.locator(".coverage rect").count() == paper_health.LAYERS
    assert page.locator(".flow .box").count() == len(paper_health.NAMES)
    assert "coordinator Aino's desktop" in page.inner_text("main")
    assert page.locator(".trace li").count() == 3
    assert page.locator(".chart rect.answered").count() > 100
    assert "Mbit/s" in page.inner_text("#linked")
    box = page.locator("h1").bounding_box()
    assert box["y"] < 100, "the verdict comes first"


def test_lost_layers_are_named_and_red(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.layer_lost())
    assert page.inner_text("h1") == "Not healthy"
    assert "Layers 24-31 are held by nobody" in page.inner_text(".verdict")
    assert page.locator(".coverage rect.lost").count() == 8
    height = "each => Math.max(...each.map(one => one.getBoundingClientRect().height))"
    lost = page.locator(".coverage rect.lost").evaluate_all(height)
    held = page.locator(".coverage :is(.good, .single)")
    assert lost < held.evaluate_all(height.replace("max", "min")), "what is lost looks like less"


def test_a_ghost_is_marked(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.ghost())
    row = page.locator("tr.flagged")
    assert row.count() == 1
    assert "not answering" in row.inner_text()
    assert "ghost" not in page.inner_text("main")
    assert "relay" in page.locator(".peers").inner_text()
    assert page.locator(".coverage rect.single").count() == 8, "a ghost is no holder"


def test_500_peers_are_drawn_in_bounds(opened: Any, server: PageServer) -> None:
    state = paper_health.many(500)
    before_s = time.process_time()
    text = server.page.render(state)
    cost_s = time.process_time() - before_s
    assert cost_s < 1.0, "rendered within the second that a visitor gives"  # CPU time, not elapsed
    assert len(text) < 1 << 20
    page = look(opened, server, state)
    assert page.locator(".peers tbody tr").count() == 500
    assert page.locator(".flow .box").count() == 4, "peers with the same layers share a box"


@pytest.mark.parametrize("bypass_csp", [False, True], ids=["policy", "escaping alone"])
def test_no_payload_runs_wherever_peers_choose_words(
    opened: Any, server: PageServer, bypass_csp: bool
) -> None:
    assert len(set(PAYLOADS)) == 200
    server.state = paper_health.hostile(PAYLOADS)
    page = opened.new_context(bypass_csp=bypass_csp).new_page()
    page.add_init_script(HIT)
    seen: list[str] = []
    page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
    page.goto(server.url)
    page.evaluate(UNFOLD)
    assert page.locator(".peers tbody tr").count() == 200
    for row in range(0, 200, 20):
        page.locator(".peers tbody tr").nth(row).hover()
    # A payload that came to life would be a script, a handler or an element of its own.
    assert page.locator("main script, main iframe, main img, main video").count() == 0
    assert page.locator("main input").count() == len(SPANS), "the page's own"
    handlers = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
        ".filter(name => name.startsWith('on')).length"
    )
    assert handlers == 0
    for text in SCRIPTS:  # those words stand alone in the model's name and the planner's
        server.state = paper_health.hostile((text,))
        page.goto(server.url)
    assert page.evaluate("window.hit.length") == 0
    assert seen == []


def test_the_probe_of_these_tests_would_see_a_payload_run(opened: Any) -> None:
    page = opened.new_page()
    page.add_init_script(HIT)
    page.route("**/*", lambda route: route.fulfill(body=SCRIPTS[0], content_type="text/html"))
    page.goto("http://paper.invalid/")
    assert page.evaluate("window.hit.length") == 1


def test_it_says_the_same_without_javascript(opened: Any, server: PageServer) -> None:
    state = paper_health.ghost()
    with_it = look(opened, server, state).inner_text("main")
    without = look(opened, server, state, java_script_enabled=False)
    assert without.inner_text("main") == with_it
    assert without.locator("noscript meta[http-equiv=refresh]").count() == 1


def test_with_javascript_a_new_state_comes_by_itself(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.healthy())
    page.get_by_role("radio", name="7 days").focus()
    page.keyboard.press("Space")
    lost = paper_health.layer_lost()
    server.state = {**lost, "generated_unix_s": lost["generated_unix_s"] + 30}
    page.get_by_role("heading", name="Not healthy").wait_for()
    assert page.locator("#over[open]").count() == 1, "what a reader opened stays"
    assert page.get_by_role("radio", name="7 days").is_checked(), "what a reader chose stays"
    assert page.evaluate("document.activeElement.id") == "span-2"


def test_charts_have_axes_and_a_span_to_choose(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.healthy())
    for name, last in (("1 h", "08:00"), ("24 h", "06:00"), ("7 days", "Fri")):
        page.get_by_role("radio", name=name, exact=True).check()
        shown = page.locator(".span:visible")
        assert shown.count() == 1
        charts = shown.locator("svg.chart")
        assert charts.count() == 2
        for chart in charts.all():
            assert chart.locator(".mark-x").last.text_content() == last
            assert chart.locator(".mark-y").first.text_content() == "0"
    rows = page.locator(".incidents li:visible").all_inner_texts()
    assert [" ".join(row.split()) for row in rows[:2]] == [
        "Fri 05:23 kestrel-2 lost; not back yet",
        "Fri 05:13 attic-3060 lost, back after 4 s",
    ]
    assert page.locator(".held text").all_text_contents()[0] == "Aino's desktop"


OVERLAPS = """selector => {
  const boxes = [...document.querySelectorAll(selector)].map(each => [each, each.getBBox()]);
  const apart = (a, b) => a.x + a.width <= b.x || b.x + b.width <= a.x
    || a.y + a.height <= b.y || b.y + b.height <= a.y;
  return boxes.flatMap(([one, a], at) => boxes.slice(at + 1)
    .filter(([two, b]) => one.ownerSVGElement === two.ownerSVGElement && !apart(a, b))
    .map(([two]) => `${one.textContent} ${two.textContent}`));
}"""
"""What covers another of the selected parts in the same drawing."""


@pytest.mark.parametrize("state", ["1", "5", "200", "healthy", "crossed", "ghost"])
def test_no_label_covers_another_or_a_box(opened: Any, server: PageServer, state: str) -> None:
    made = paper_health.many(int(state)) if state.isdigit() else getattr(paper_health, state)()
    page = look(opened, server, made)
    for width in (390, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(OVERLAPS, "svg.flow text") == []
        assert page.evaluate(OVERLAPS, "svg.flow > text, svg.flow .box") == []
        assert page.evaluate(OVERLAPS, ".held text, .held rect") == []
        for span in page.locator(".over input").all():
            span.check()
            assert page.evaluate(OVERLAPS, ".chart text") == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
    if state == "crossed":
        assert page.locator("svg.flow > text.small").count() == 8, "there is room for each"
        page.evaluate(
            "() => { const [a, b] = document.querySelectorAll('svg.flow > text');"
            " a.setAttribute('x', b.getAttribute('x')); a.setAttribute('y', b.getAttribute('y')); }"
        )
        assert page.evaluate(OVERLAPS, "svg.flow text"), "it would see labels that collide"


def test_models_are_listed_and_their_commands_copied(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.healthy(), permissions=["clipboard-read"])
    rows = page.locator(".models li").all_inner_texts()
    assert ["watched here" in row for row in rows] == [True, False, False]
    for row, verdict in zip(rows, ("healthy", "healthy, but fragile", "not whole"), strict=True):
        assert verdict in row.split("\n")
    button = page.locator(".models li").nth(1).locator(".copy").first
    button.focus()
    page.keyboard.press("Enter")
    page.locator(".copy.done").wait_for()
    command = page.locator(".models li").nth(1).locator("code").first.inner_text()
    assert command.startswith(
        f"anabranch chat {paper_health.INVITATION} --model brook --fingerprint "
    )
    assert "where this network is entered" in page.inner_text("main")
    assert page.evaluate("navigator.clipboard.readText()") == command
    lines = "each => each.offsetHeight / parseFloat(getComputedStyle(each).fontSize)"
    words = page.evaluate(f"Array.from(document.querySelectorAll('.command code span'), {lines})")
    assert words
    assert max(words) < 2, "no line of a command ends within a word"
    # The invitation is drawn short, and is whole where somebody selects it.
    assert page.locator(".models .word").first.bounding_box()["width"] < 200
    page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('.models code')[2])")
    assert page.evaluate("String(getSelection())") == command
    # A newer state takes the focus from nobody, and a model is not healthy whose answers fail.
    newer = paper_health.observed([paper_health.record(0, 0, 32)], reason="no free peer")
    server.state = build_state(replace(newer, now_unix_s=newer.now_unix_s + 1))
    page.get_by_role("heading", name="Not healthy").wait_for()
    assert "not healthy" in page.locator(".models li").first.inner_text()
    assert page.evaluate("document.activeElement.dataset.copy") == command


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_nothing_is_wider_than_the_page(opened: Any, server: PageServer, width: int) -> None:
    page = look(opened, server, paper_health.healthy(), viewport={"width": width, "height": 900})
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(wide) == 0


@pytest.mark.parametrize("state", ["healthy", "many"])
def test_a_phone_scrolls_down_only(opened: Any, server: PageServer, state: str) -> None:
    made = paper_health.many(40) if state == "many" else paper_health.healthy()
    page = look(opened, server, made, viewport={"width": 360, "height": 740})
    page.evaluate(UNFOLD.replace("true", "false"))
    folded_px = page.evaluate("document.documentElement.scrollHeight")
    page.evaluate(UNFOLD)
    assert folded_px < page.evaluate("document.documentElement.scrollHeight") / 2
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0
    size = "parseFloat(getComputedStyle(document.querySelector('.peers td')).fontSize)"
    assert page.evaluate(size) >= 12


@pytest.mark.parametrize("peers", [1, 5, 40])  # the last are more than are drawn one by one
def test_axe_finds_nothing(opened: Any, server: PageServer, peers: int) -> None:
    page = look(opened, server, paper_health.many(peers))
    for width in (390, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert findings(page) == [], (width, scheme)


def test_axe_sees_text_that_is_too_pale(opened: Any, server: PageServer) -> None:
    page = look(opened, server, paper_health.many(1))
    page.evaluate("document.querySelector('.verdict p').style.color = '#ccc'")
    assert [each.split(":")[0] for each in findings(page)] == ["color-contrast"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(opened: Any, server: PageServer, scheme: str) -> None:
    page = look(opened, server, paper_health.healthy(), color_scheme=scheme)
    for where in (".verdict p", ".verdict .soft", "h1", "td", "th"):
        ink = page.evaluate(f"getComputedStyle(document.querySelector('{where}')).color")
        card = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
        assert contrast(ink, card) >= 4.2, (where, ink, card)
