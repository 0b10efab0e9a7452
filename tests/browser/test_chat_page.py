"""The chat in a real browser: by keyboard alone, while peers leave, and with words that attack."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.keys import plain_keys
from client.gateway.web.app import GatewayConfig
from dht.errors import SwarmError
from tests.browser.conftest import HIT, contrast, findings
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
RICH = (
    "# One\n\n#### Deep\n\n| a | b |\n|---|--:|\n| $x^2$ | 1 |\n\n> - [x] *done*\n\n"
    "```python\ndef f(): return 'a'  # b\n```\n\n1. [link](https://example.org/a)"
)
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
    assert "stopped" in page.locator(".figures").nth(1).inner_text()
    assert gateway.swarm.served == served + 1
    gateway.swarm.gate = None
    # All that can be used is reached by Tab, and shows that it is.
    reached = []
    for _ in range(40):
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
    assert {"new", "seek", "model", "set", "quiet again", "quiet editing"} <= set(reached)
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
        assert "goes on writing" in page.inner_text(".figures")
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
    size = "Math.min(...[...document.querySelectorAll('.stage .layers, .figures')]"
    assert page.evaluate(f"{size}.map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 12


@pytest.mark.parametrize("width", [390, 1280])
def test_no_stage_looks_larger_than_those_with_more_layers(
    opened: Any, gateway: GatewayBeside, width: int
) -> None:
    spans = {"a": (0, 2), "b": (2, 5), "c": (5, 7), "d": (7, 8)}
    gateway.do(lambda: gateway.swarm.serve(spans))
    page = look(opened, gateway, viewport={"width": width, "height": 800})
    say(page, "Hi")
    ended(page)
    widths = "[...document.querySelectorAll('.stage')].map(each => each.offsetWidth)"
    *others, one_layer = page.evaluate(widths)
    assert len(others) == 3
    assert one_layer <= min(others) + 1


@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(opened: Any, gateway: GatewayBeside, width: int) -> None:
    gateway.swarm.says = RICH
    page = look(opened, gateway, viewport={"width": width, "height": 844})
    for step in ("empty", "answered", "settings", "editing"):
        if step == "answered":
            say(page, "Hi")
            ended(page)
        elif step == "settings":
            page.locator("#set").click()
        elif step == "editing":
            page.locator("#done").click()
            page.locator("#menu:visible, #side:visible").first.click()
            page.locator(".editing").dispatch_event("click")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert findings(page) == [], (step, scheme)


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


def drawn(page: Any, text: str, size: int) -> str:
    """The elements of a Markdown text that comes in pieces of ``size`` characters."""
    return page.evaluate(
        """async ([text, size]) => {
          const { markdownView } = await import("/static/markdown.js");
          const into = document.createElement("div"), view = markdownView(into);
          for (let at = size; at < text.length + size; at += size) view.write(text.slice(0, at));
          into.querySelectorAll("[dir]").forEach((each) => each.removeAttribute("dir"));
          into.querySelectorAll("annotation").forEach((each) => each.remove());
          return into.innerHTML;
        }""",
        [text, size],
    )


LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
MARKDOWN = {
    "**a** *b* ***c*** ~~d~~ `e*` f_g_h 2 * 3": (
        "<p><strong>a</strong> <em>b</em> <em><strong>c</strong></em> <s>d</s> <code>e*</code>"
        " f_g_h 2 * 3</p>"
    ),
    "# A\n### B\n##### C": (
        '<h3 class="size1">A</h3><h4 class="size3">B</h4><h5 class="size4">C</h5>'
    ),
    "- a\n  - b\n\n1. c\nd\n2) e": (
        '<ul class="tight"><li>a<ul class="tight"><li>b</li></ul></li></ul>'
        '<ol class="tight"><li>c\nd</li></ol><ol class="tight" start="2"><li>e</li></ol>'
    ),
    "a\n---\n> b\n>\n> c": "<p>a</p><hr><blockquote><p>b</p><p>c</p></blockquote>",
    "a | b\n:-:|--\n`x\\|y`": (
        '<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
        '<th class="center">a</th><th>b</th></tr></thead><tbody><tr><td class="center">'
        "<code>x|y</code></td><td></td></tr></tbody></table></div>"
    ),
    "[a](https://b.c/d) [e](javascript:x()) [f](data:text/html,x)": (
        f'<p><a href="https://b.c/d" {LINK} title="https://b.c/d">a</a>'
        '<span class="host"> (b.c)</span> [e](javascript:x()) [f](data:text/html,x)</p>'
    ),
    "![a](//b.c/d) &lt;b&gt;<br><b onclick=x()>": (
        "<p>![a](//b.c/d) &lt;b&gt;<br>&lt;b onclick=x()&gt;</p>"
    ),
    "it costs $5 or $10": "<p>it costs $5 or $10</p>",
    "$\\frac{a}{2}$ \\(\\constructor\\) $\\frac{$": (
        "<p><math><semantics><mrow><mfrac><mi>a</mi><mn>2</mn></mfrac></mrow></semantics></math>"
        " <math><semantics><mrow><mtext>\\constructor</mtext></mrow></semantics></math>"
        ' <code class="tex">\\frac{</code></p>'
    ),
    "```js\nlet a = '<b>' // c": (
        '<figure class="code"><figcaption>js<button class="quiet" type="button">Copy</button>'
        '</figcaption><pre tabindex="0"><code><span class="of-word">let</span> a = '
        "<span class=\"of-string\">'&lt;b&gt;'</span> "
        '<span class="of-comment">// c</span></code></pre></figure>'
    ),
}


def test_markdown_becomes_elements_alike_in_whatever_pieces_it_comes(
    opened: Any, gateway: GatewayBeside
) -> None:
    page = look(opened, gateway)
    for text, elements in MARKDOWN.items():
        assert drawn(page, text, len(text)) == elements
    whole = "\n\n".join([*MARKDOWN, RICH])
    assert {drawn(page, whole, size) for size in (1, 7, len(whole))} == {drawn(page, whole, 64)}


HOSTILE = (
    "[",
    "](",
    "*a **b ",
    "`a``",
    "$a",
    "\\[\n",
    "> ",
    "- ",
    "~~a",
    "<",
    "https://x.",
    "# a\n",
)


def test_a_hostile_megabyte_neither_nests_without_end_nor_runs(
    opened: Any, gateway: GatewayBeside
) -> None:
    page = look(opened, gateway)
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    nested = [
        "$" + "{" * 3000 + "$",
        "**a *b " * 99 + "c* d** " * 99,
        "|a" * 9000 + "\n" + "|-" * 9000,
    ]
    # What is rich ends at 128 Ki characters; a megabyte of each would take the suite minutes.
    sized = [(unit, 1 << 20) for unit in nested[:1]] + [
        (unit, 1 << 16) for unit in (*nested, *HOSTILE)
    ]
    for unit, size in sized:
        depth, length = page.evaluate(
            """async ([unit, times]) => {
              const { markdownView } = await import("/static/markdown.js");
              const into = document.createElement("div");
              markdownView(into).write(unit.repeat(times));
              let depth = 0;
              const walker = document.createTreeWalker(into, NodeFilter.SHOW_ELEMENT);
              for (let each = walker.nextNode(); each; each = walker.firstChild()) depth += 1;
              return [depth, into.textContent.length];
            }""",
            [unit, max(1, size // len(unit))],
        )
        assert depth < 100, unit[:9]
        assert length > 0
    assert page.evaluate("window.hit.length") == 0


def test_chats_are_kept_edited_and_asked_again(opened: Any, gateway: GatewayBeside) -> None:
    page = look(opened, gateway)
    sent: list[Any] = []
    page.on("request", lambda asked: asked.method == "POST" and sent.append(asked.post_data_json))
    page.locator("#set").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.5")
    page.locator("#done").click()
    page.locator("#box").focus()
    say(page, "First")
    ended(page)
    system = {"role": "system", "content": "Be brief."}
    assert sent[-1]["messages"] == [system, {"role": "user", "content": "First"}]
    assert sent[-1]["temperature"] == 0.5
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" of all")
    page.keyboard.press("Enter")
    ended(page)
    page.locator(".versions", has_text="2/2").wait_for()
    assert sent[-1]["messages"][1:] == [{"role": "user", "content": "First of all"}]
    page.locator(".again").click()
    page.locator(".answer .versions", has_text="2/2").wait_for()
    ended(page)
    say(page, "Second")
    ended(page, 2)
    assert [each["role"] for each in sent[-1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    page.reload()
    page.locator("#chats .open").click()
    page.locator(".mine", has_text="Second").wait_for()
    assert page.locator(".mine").all_inner_texts() == ["First of all", "Second"]
    assert page.locator(".answer pre").count() == 2
    page.locator(".said .versions button").first.click()
    page.locator(".mine", has_text="First").wait_for()
    assert page.locator(".mine").all_inner_texts() == ["First"], "the branch that was left is there"
    page.locator("#set").click()
    with page.expect_download() as told:
        page.locator("#asmarkdown").click()
    exported = told.value.path().read_text("utf-8")
    assert exported.startswith("# First\n\n> Be brief.\n\n## You\n\nFirst\n\n## brook\n\nOne")
    page.locator("#done").click()
    page.get_by_role("button", name="Rename First").click()
    page.keyboard.type("<b>Mine")
    page.keyboard.press("Enter")
    page.locator("#chats .open", has_text="<b>Mine").wait_for()
    page.get_by_role("button", name="Delete <b>Mine").click()
    page.locator("#chats .open").wait_for(state="detached")
    assert page.locator(".mine").count() == 0
    page.get_by_role("button", name="Undo").click()
    page.locator("#chats .open").click()
    assert page.locator(".mine").all_inner_texts() == ["First"]


def test_on_a_phone_enter_begins_a_line(opened: Any, gateway: GatewayBeside) -> None:
    size = {"width": 390, "height": 844}
    page = look(opened, gateway, viewport=size, has_touch=True, is_mobile=True)
    page.locator("#box").tap()
    page.keyboard.type("Once")
    page.keyboard.press("Enter")
    page.keyboard.type("more")
    assert page.locator(".answer").count() == 0
    page.locator("#send").tap()
    ended(page)
    assert page.inner_text(".mine") == "Once\nmore"
    page.locator("#menu").tap()
    page.locator("#chats .open", has_text="Once more").tap()
    page.locator("#side").wait_for(state="hidden")
