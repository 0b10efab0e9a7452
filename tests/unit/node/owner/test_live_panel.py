"""What the owner of a peer sees and what is kept of it."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dht.errors import UserError
from dht.identity.peer_id import Identity
from dht.messages.types import DeviceSpec, Link, NodeState
from node.device.hardware import Machine, at_most
from node.owner.contribution import Contribution, load, save
from node.owner.live_panel import PANEL, Figures, OwnerPanel, elapsed_text, holders, sentence, strip
from node.owner.reporter import Reporter
from node.peer.join_file import as_flags
from node.peer.join_options import join_parser
from tests.unit.node.owner.terminal import Terminal
from tests.unit.records import record_of

NEAR = Identity(b"n" * 32).peer_id
FIGURES = Figures(
    state=NodeState.SERVING,
    start=4,
    end=8,
    layers=12,
    sessions=3,
    tokens=4321,
    up_bytes=5 << 20,
    down_bytes=7 << 20,
    peers=4,
    tokens_per_s=12.5,
    uptime_s=3 * 3600 + 7 * 60,
    lifetime=Contribution(tokens=99_000, sessions=120, serving_s=90_000.0),
    links=(
        Link(
            source=NEAR,
            target="me",
            bandwidth_bytes_per_s=1e6,
            rtt_s=0.012,
            measured_unix_s=1.0,
        ),
    ),
    device="GPU [bold]9000[/bold]",
    temperature_c=61.0,
    power_w=143.2,
)


def test_the_panel_and_the_line_say_the_same_figures() -> None:
    out = io.StringIO()
    Console(file=out, width=100, height=24).print(OwnerPanel(FIGURES))
    text = out.getvalue()
    for part in (
        "serving: layers 4-7 of 12",
        "3 sessions, 12.5 tokens/s, 4321 tokens",
        "5.0 MiB",
        f"4 others: {NEAR[-8:]} 12.0 ms",
        "GPU [bold]9000[/bold], 61 °C, 143 W",
        "99000 tokens in 120 answers, 1 d 1 h of serving",
        "3 h 07 min",
    ):
        assert part in text
    assert "layers 4-7" in sentence(FIGURES)
    one = sentence(replace(FIGURES, start=3, end=4, sessions=1, peers=1))
    assert one.startswith("serving: layer 3 of 12; 1 session, 4321 tokens, 12.5 tokens/s;")
    assert "; 1 other peer;" in one
    assert [elapsed_text(s) for s in (0.9, 59, 60, 3599)] == ["0 s", "59 s", "1 min", "59 min"]


def test_a_peer_that_stepped_aside_says_why() -> None:
    aside = replace(FIGURES, state=NodeState.DRAINING, start=0, end=0, aside="steam runs")
    assert "aside, steam runs" in shown(aside)
    assert sentence(aside).startswith("aside, steam runs; 3 sessions")
    assert "no layers yet" not in shown(aside) + sentence(aside)


def test_the_owner_sees_how_much_of_the_month_is_used() -> None:
    capped = replace(FIGURES, month_bytes=12_340_000_000, month_bytes_max=300e9)
    for text in (shown(capped, width=120), sentence(capped)):
        assert "12.3 of this month's 300 GB" in text
    assert "month" not in shown(FIGURES) + sentence(FIGURES)


def shown(figures: Figures, width: int = 100, height: int = 60) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(OwnerPanel(figures))
    return out.getvalue()


def test_the_panel_says_where_it_helps_and_what_is_waited_for() -> None:
    held = (0, 2, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0)
    told = replace(
        FIGURES,
        model="brook",
        network="home",
        held=held,
        rates=(0.0, 5.0, 10.0),
        names={NEAR: "Ada's \x1b[31m[red]PC\n"},
    )
    text = shown(told)
    assert "brook in network home" in text
    assert "·▄▄▄████▄▄▄·" in text
    assert "▁▅█ at most 10.0 tokens/s" in text
    assert "somebody to serve layers 0 and 11" in text
    assert "4 others: Ada's \N{REPLACEMENT CHARACTER}[31m[red]PC 12.0 ms" in text
    assert "nobody else yet" in shown(replace(told, peers=0, links=()))
    loading = shown(replace(told, state=NodeState.LOADING))
    assert "·▄▄▄▒▒▒▒▄▄▄·" in loading
    assert "somebody to serve layers 0, 4-5, 7 and 11" in loading
    assert "waits for" not in shown(replace(told, held=(1,) * 12))
    assert "lately" not in shown(replace(told, rates=(0.0, 0.0)))


@given(layers=st.integers(1, 300), width=st.integers(20, 120), data=st.data())
def test_a_strip_of_any_model_and_a_panel_of_any_width_have_no_torn_line(
    layers: int, width: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, layers - 1))
    end = data.draw(st.integers(start + 1, layers))
    figures = replace(FIGURES, start=start, end=end, layers=layers, held=(1,) * layers)
    cells = strip(figures).plain
    assert len(cells) == min(layers, PANEL.strip_cells_max)
    assert "█" in cells
    assert set(cells) <= {"█", "▄"}
    lines = shown(figures, width).splitlines()
    assert {cell_len(line) for line in lines} == {width}


FULL = replace(
    FIGURES,
    model="brook",
    network="home",
    held=(0, *(1,) * 11),
    rates=(0.0, 5.0, 10.0),
    links=tuple(
        replace(FIGURES.links[0], source=Identity(bytes([n]) * 32).peer_id) for n in range(6)
    ),
)
"""Figures that fill every row."""


@pytest.mark.parametrize(
    ("width", "height", "there", "left_out"),
    [
        (80, 24, ("mate", "▁▅█", "▄▄▄████▄▄▄▄", "up for", "so far", "waits for"), ()),
        (80, 10, ("6 others", "waits for", "traffic"), ("mate", "▁▅█", "████", "up for")),
        (80, 6, ("4321 tokens since",), ("others", "▁▅█", "████", "traffic", "device")),
        (40, 24, ("mate-5", "▄▄▄████▄▄▄▄", "up for", "GPU"), ()),
        (40, 10, ("4321 tokens",), ("others", "▁▅█", "████", "traffic", "device")),
        (40, 6, (), ("others", "▁▅█", "████", "4321", "waits for")),
    ],
)
def test_a_panel_fits_the_terminals_rows(
    width: int, height: int, there: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    names = {link.source: f"mate-{n}" for n, link in enumerate(FULL.links)}
    figures = replace(FULL, peers=6, names=names)
    text = shown(figures, width, height)
    lines = text.splitlines()
    assert len(lines) < height, "a line stays free"
    assert {cell_len(line) for line in lines} == {width}
    assert (lines[0][0], lines[-1][0]) == ("╭", "╰"), "with its whole border"
    assert "serving: layers 4-7 of 12" in text
    words = " ".join(text.replace("│", " ").split())
    assert "99000 tokens in 120 answers, 1 d 1 h of serving" in words
    for part in there:
        assert part in words
    for part in left_out:
        assert part not in words


def test_a_terminal_without_rows_for_a_border_says_the_state_and_the_totals() -> None:
    lines = shown(FULL, 80, 3).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "state serving: layers 4-7 of 12",
        "so far 99000 tokens in 120 answers, 1 d 1 h of serving",
    ]


def test_a_panel_leaves_nothing_on_a_low_terminal() -> None:
    for width, height in ((80, 6), (40, 6), (80, 10), (40, 4)):
        terminal = Terminal(width, height)
        reporter = Reporter(json_log=False, out=terminal)
        reporter._console = Console(
            file=terminal, force_terminal=True, width=width, height=height, soft_wrap=True
        )
        for tokens in (1, 2, 3):
            figures = replace(FULL, tokens=tokens)
            reporter.show(partial(OwnerPanel, figures), lambda: "")
        lines = terminal.lines()
        assert len(lines) <= height
        assert sum("serving: layers 4-7 of 12" in line for line in lines) == 1
        reporter.hide()
        assert terminal.lines() == []


def test_holders_are_counted_by_layer_of_this_very_model() -> None:
    mine = record_of("a").model
    others = [
        record_of("b", 1, 3),
        record_of("c", 2, 4),
        record_of("d", 0, 4, state=NodeState.LOADING),
        record_of("e", 0, 4, model=replace(mine, root="another")),
    ]
    assert holders(mine, others) == (0, 1, 2, 1, *(0,) * (mine.layers - 4))


def test_a_terminal_gets_the_view_and_a_file_a_line_now_and_then() -> None:
    out = io.StringIO()
    reporter = Reporter(json_log=False, out=out)
    for _ in range(3):
        reporter.show(lambda: OwnerPanel(FIGURES), lambda: sentence(FIGURES))
    assert out.getvalue() == "", "not a line every two seconds"
    screen = io.StringIO()
    reporter = Reporter(json_log=False, out=screen)
    reporter._console = Console(file=screen, force_terminal=True, width=90)
    reporter.show(lambda: OwnerPanel(FIGURES), lambda: "line")
    with reporter.phase("Loading"):
        reporter.show(
            lambda: OwnerPanel(FIGURES), lambda: "line"
        )  # a phase has the terminal: no second live display
    reporter.show(lambda: OwnerPanel(FIGURES), lambda: "line")
    reporter.hide()
    assert "Ctrl-C leaves" in screen.getvalue()
    assert "Loading" in screen.getvalue()


def test_contribution_is_kept_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "peer.contribution.json"
    assert load(path) == Contribution()
    save(path, load(path).plus(10, 1, 2.5))
    save(path, load(path).plus(5, 0, 1.0))
    assert load(path) == Contribution(tokens=15, sessions=1, serving_s=3.5)
    for text in ("", "[]", '{"tokens": -1, "sessions": 0, "serving_s": 0}', '{"tokens": "x"}'):
        path.write_text(text)
        assert load(path) == Contribution()
    save(tmp_path / "missing" / "x.json", Contribution())  # reported, not raised


def test_a_configuration_file_has_the_flags_names_and_flags_go_before() -> None:
    parser = join_parser()
    text = 'model = "org/name"\ncpu = true\nmemory = 2.5\ninitial-peers = ["/ip4/a", "/ip4/b"]\n'
    flags = as_flags(text, parser)
    read = parser.parse_args([*flags, "--memory", "1"])
    assert (read.model, read.cpu, read.memory) == ("org/name", True, 1.0)
    assert read.initial_peers == ["/ip4/a", "/ip4/b"]
    assert as_flags("test = false", parser) == []
    for bad, reason in (
        ("modle = 1", "'modle'"),
        ("cpu = 3", "true or false"),
        ("model = [1]", "one value"),
        ("name = {}", "text or numbers"),
        ("memory = true", "text or numbers"),
        ("= x", "not TOML"),
        ('config = "x"', "'config'"),
    ):
        with pytest.raises(UserError, match=reason):
            as_flags(bad, parser)


def test_max_vram_bounds_what_is_lent() -> None:
    def machine(kind: str) -> Machine:
        device = DeviceSpec(kind=kind, name="x", memory_bytes=24 << 30)
        return Machine(device=device, torch_device=kind, free_bytes=20 << 30, lend_bytes=17 << 30)

    assert at_most(machine("cuda"), 8.0).lend_bytes == 8 << 30
    assert at_most(machine("cuda"), 18.0).lend_bytes == 17 << 30
    assert at_most(machine("cpu"), None).lend_bytes == 17 << 30
