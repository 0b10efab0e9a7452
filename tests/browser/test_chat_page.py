"""The chat in a real browser: by keyboard alone, while peers leave, and with words that attack."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.keys import plain_keys
from client.gateway.web.app import GatewayConfig
from dht.errors import SwarmError
from tests.browser.conftest import HIT, contrast, serious_findings
from tests.unit.client.gateway.beside import GatewayBeside, gateway_beside

pytestmark = pytest.mark.browser

PAYLOADS = (
    "<script>x()</script>",
    "<img src=x onerror=x()>",
    "</p><svg onload=x()>",
    "<a href=javascript:x()>y</a>",
    "```<img src=x onerror=x()>\n</code><script>x()</script>\n```",
    "`<img src=x onerror=x()>`",
)
PEERS = {"birch": (0, 3), "attic-3060": (3, 6), "uni-lab-2": (6, 8), "kestrel": (0, 3)}
SAYS = "One morning:\n\n```python\nprint(1)\n```\n\nThat `is` all."
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def shared() -> Iterator[GatewayBeside]:
    with gateway_beside(others=(PAYLOADS[0], "org/other")) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared: GatewayBeside) -> GatewayBeside:
    """As it was before any other test."""
    swarm = shared.swarm
    swarm.says, swarm.loses_at, swarm.mended, swarm.gate = SAYS, None, None, None
    swarm.fails, swarm.fails_after = None, None
    shared.do(lambda: swarm.serve(PEERS))
    return shared


def look(opened: Any, gateway: GatewayBeside, **context: Any) -> Any:
    page = opened.new_context(**context).new_page()
    page.add_init_script(HIT)
    page.goto(gateway.url)
    page.locator("#model option", has_text="org/other").wait_for(state="attached")
    return page


def say(page: Any, text: str) -> None:
    """Type and send a message by the keyboard."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def ended(page: Any, count: int = 1) -> None:
    page.locator(".text[aria-busy=false]").nth(count - 1).wait_for(state="attached")
    page.locator("#send:not(.stop)").wait_for()


def test_a_conversation_by_keyboard_alone(opened: Any, gateway: GatewayBeside) -> None:
    page = look(opened, gateway)
    assert page.evaluate("document.activeElement.id") == "box", "one can type at once"
    page.keyboard.type("Once")
    page.keyboard.press("Shift+Enter")
    assert page.locator(".answer").count() == 0
    say(page, "more")
    ended(page)
    assert page.inner_text(".mine") == "Once\nmore"
    assert page.locator(".text p").all_inner_texts() == ["One morning:", "That is all."]
    assert page.inner_text(".text pre") == "print(1)"
    assert page.locator(".text[aria-live=polite]").count() == 1
    served = gateway.swarm.served
    gateway.swarm.gate = asyncio.Event()
    say(page, "Again")
    page.locator("#send.stop").wait_for()
    page.locator(".event", has_text="prompt is on its way").wait_for()
    page.keyboard.press("Escape")
    ended(page, 2)
    assert "stopped" in page.locator(".foot").nth(1).inner_text()
    assert gateway.swarm.served == served + 1
    gateway.swarm.gate = None
    # All that can be used is reached by Tab, and shows that it is.
    reached = []
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.className")
        )
        shown = (
            "getComputedStyle(document.activeElement.closest('.field') ||"
            " document.activeElement).outlineStyle !== 'none'"
        )
        if page.evaluate("document.activeElement !== document.body"):
            assert page.evaluate(shown), reached[-1]
    assert {"new", "model", "again"} <= set(reached)
    page.locator("#new").focus()
    page.keyboard.press("Enter")
    assert page.locator(".answer").count() == 0
    assert page.evaluate("document.activeElement.id") == "box"


def test_a_peer_that_leaves_is_seen_while_it_is_replaced(
    opened: Any, gateway: GatewayBeside
) -> None:
    gateway.swarm.loses_at, gateway.swarm.mended = 3, asyncio.Event()
    page = look(opened, gateway)
    say(page, "Hi")
    page.locator(".event.now", has_text="birch left; rerouting…").wait_for()
    assert page.locator(".stage.gone .name").all_inner_texts() == ["birch"]
    gateway.do(gateway.swarm.mended.set)
    ended(page)
    assert page.locator(".event.now").count() == 0
    assert page.inner_text(".event.over") == "Rerouted around birch."
    assert page.locator(".stage .name").all_inner_texts() == ["kestrel", "attic-3060", "uni-lab-2"]
    assert page.locator(".stage.fresh .name").all_inner_texts() == ["kestrel"]
    layers = ["layers 0–2", "layers 3–5", "layers 6–7"]
    assert page.locator(".stage .layers").all_inner_texts() == layers
    assert "one left on the way" in page.inner_text(".route summary")


def test_an_error_is_told_and_tried_again(opened: Any, gateway: GatewayBeside) -> None:
    gateway.swarm.fails, gateway.swarm.fails_after = SwarmError("nobody has room"), 3
    page = look(opened, gateway)
    say(page, "Hi")
    page.locator(".answer .note", has_text="nobody has room").wait_for()
    gateway.swarm.fails = None
    page.locator(".again").focus()
    page.keyboard.press("Enter")
    ended(page)
    assert page.locator(".answer").count() == 1
    assert page.locator(".answer .note").count() == 0
    assert page.inner_text(".text pre") == "print(1)"


@pytest.mark.parametrize("bypass_csp", [False, True], ids=["policy", "text nodes alone"])
def test_no_payload_runs_wherever_others_choose_words(
    opened: Any, gateway: GatewayBeside, bypass_csp: bool
) -> None:
    page = look(opened, gateway, bypass_csp=bypass_csp)
    assert PAYLOADS[0] in page.locator("#model option").all_inner_texts()
    page.locator("#model").select_option(PAYLOADS[0])
    spans = ((0, 2), (2, 4), (4, 6), (6, 7), (7, 8))
    peers = dict(zip(PAYLOADS, spans, strict=False))
    gateway.do(lambda: gateway.swarm.serve(peers))
    gateway.swarm.says = "\n\n".join(PAYLOADS)
    page.locator("#box").focus()
    say(page, PAYLOADS[1])
    ended(page)
    assert page.inner_text(".mine") == PAYLOADS[1]
    assert page.locator(".text p").first.inner_text() == PAYLOADS[0]
    assert page.locator(".stage .name").first.inner_text() == PAYLOADS[0]
    gateway.swarm.fails = SwarmError(" ".join(PAYLOADS))
    say(page, PAYLOADS[2])
    page.locator(".answer .note", has_text=PAYLOADS[1]).wait_for()
    # A payload that came to life would be an element or a handler of its own.
    assert page.locator("main :is(script, img, a, svg, iframe)").count() == 0
    handlers = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
        ".filter(name => name.startsWith('on')).length"
    )
    assert handlers == 0
    assert page.evaluate("window.hit.length") == 0


def test_a_model_without_a_chat_template_goes_on_writing(opened: Any) -> None:
    with gateway_beside(template=None) as gateway:
        gateway.swarm.says = " there was a river."
        page = opened.new_page()
        page.goto(gateway.url)
        page.locator("#model option", has_text="brook").wait_for(state="attached")
        page.locator("#box").focus()
        say(page, "Once")
        ended(page)
        assert page.inner_text(".text").strip() == "there was a river."
        assert "goes on writing" in page.inner_text(".foot")
        assert page.locator(".stage").count() == 1


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(opened: Any) -> None:
    with gateway_beside(config=GatewayConfig(keys=plain_keys(("right",)))) as gateway:
        gateway.swarm.says = SAYS
        context = opened.new_context()
        page = context.new_page()
        page.goto(gateway.url)
        page.locator("#keybox").wait_for()
        say(page, "wrong")
        page.locator("#notice", has_text="not valid").wait_for()
        say(page, "right")
        page.locator("#keybox").wait_for(state="hidden")
        say(page, "Hi")
        ended(page)
        assert page.locator("#model").input_value() == "brook"
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.reload()
        page.locator("#model option", has_text="brook").wait_for(state="attached")
        other = context.new_page()
        other.goto(gateway.url)
        other.locator("#keybox").wait_for()


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_it_scrolls_down_only_at_every_width_in_light_and_dark(
    opened: Any, gateway: GatewayBeside, width: int
) -> None:
    page = look(opened, gateway, viewport={"width": width, "height": 800})
    assert page.evaluate(WIDE) == 0
    page.locator("#model").select_option(PAYLOADS[0])
    gateway.swarm.says = "w" * 90 + "\n\n```\n" + "long code " * 20 + "\n```"
    page.locator("#box").fill("u" * 300)
    page.keyboard.press("Enter")
    ended(page)
    inside = "[...document.querySelectorAll('button, select, textarea, .mine, .text, .route')]"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(WIDE) == 0
        assert page.evaluate(f"{inside}.every(e => e.getBoundingClientRect().right <= innerWidth)")
    size = "Math.min(...[...document.querySelectorAll('.stage .layers, .foot')]"
    assert page.evaluate(f"{size}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 12


def test_axe_finds_nothing_serious(opened: Any, gateway: GatewayBeside) -> None:
    page = look(opened, gateway)
    for message in ("", "Hi"):
        if message:
            say(page, message)
            ended(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert serious_findings(page) == [], (message, scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(
    opened: Any, gateway: GatewayBeside, scheme: str
) -> None:
    gateway.swarm.loses_at, gateway.swarm.mended = 3, asyncio.Event()
    page = look(opened, gateway, color_scheme=scheme)
    say(page, "Hi")
    page.locator(".event.now").wait_for()
    behind = {
        ".mine": ".mine",
        ".text p": "body",
        ".event.now": ".event.now",
        "summary": ".route",
        ".stage.gone .name": ".route",
        ".stage .layers": ".route",
        "#send": "#send",
        ".hint": "body",
    }
    colour = "([where, what]) => getComputedStyle(document.querySelector(where))[what]"
    for text, ground in behind.items():
        ink = page.evaluate(colour, [text, "color"])
        card = page.evaluate(colour, [ground, "backgroundColor"])
        assert contrast(ink, card) >= 4.5, (text, ink, card)
    gateway.do(gateway.swarm.mended.set)
    ended(page)
