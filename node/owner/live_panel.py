"""Formats a serving peer's figures for its owner: a panel on a terminal, otherwise a line. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dht.identity.peer_id import short_name
from dht.messages.types import Link, ModelSpec, NodeRecord, NodeState, layer_ranges, layers_text
from dht.process.terminal import printable
from node.owner.contribution import Contribution
from node.owner.reporter import counted, gibibytes, layers_sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelConfig:
    peers_shown_max: int = 6
    strip_cells_max: int = 48
    rates_shown_max: int = 40


PANEL = PanelConfig()

BARS = "▁▂▃▄▅▆▇█"
LEFT_OUT = ("lately", "layers", "up for", "device", "traffic", "peers", "model", "waits for", "now")
"""Rows that are left out where a terminal is too low for all, from the first to the last. The names
of other peers go before them, and the border after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a peer at one moment. Rates are means since the previous look."""

    state: NodeState
    start: int
    end: int
    layers: int
    sessions: int
    tokens: int
    """Tokens computed since this start."""
    up_bytes: int
    down_bytes: int
    peers: int
    """Number of other peers announced."""
    tokens_per_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    uptime_s: float = 0.0
    lifetime: Contribution = Contribution()  # noqa: RUF009  frozen
    links: tuple[Link, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """What other peers call themselves, by their ids."""
    held: tuple[int, ...] = ()
    """Number of other peers that serve each layer, as announced; empty: not known yet."""
    model: str = ""
    network: str = ""
    rates: tuple[float, ...] = ()
    """Tokens/s of the last looks, the newest last."""
    device: str = ""
    temperature_c: float | None = None
    power_w: float | None = None
    month_bytes: int = 0
    """Traffic of this month, both ways, where it has a limit."""
    month_bytes_max: float | None = None
    aside: str = ""
    """Why this machine lends nothing now; empty: it lends."""


def holders(model: ModelSpec, others: Iterable[NodeRecord]) -> tuple[int, ...]:
    """Number of ``others`` that serve each layer of ``model``."""
    held = [0] * model.layers
    for other in others:
        if other.state is NodeState.SERVING and other.model.serves_with(model):
            for layer in range(other.start, min(other.end, len(held))):
                held[layer] += 1
    return tuple(held)


def sentence(figures: Figures) -> str:
    """The figures as one plain line."""
    lifetime = figures.lifetime
    return (
        f"{state_text(figures)};"
        f" {counted(figures.sessions, 'session')}, {counted(figures.tokens, 'token')},"
        f" {figures.tokens_per_s:.1f} tokens/s;"
        f" up {gibibytes(figures.up_bytes)}, down {gibibytes(figures.down_bytes)}"
        f"{month_text(figures)};"
        f" {counted(figures.peers, 'other peer')}; up for {elapsed_text(figures.uptime_s)};"
        f" {lifetime.tokens} tokens in all"
    )


def state_text(figures: Figures) -> str:
    """What this peer does, in words."""
    if figures.aside:
        return f"aside, {figures.aside}"
    return layers_sentence(figures.start, figures.end, figures.layers, figures.state)


class OwnerPanel:
    """The figures as a panel that fits the terminal: what matters least is left out first.

    The terminal's last line stays free, so that nothing of the panel scrolls away when it is
    removed. The state and the totals are always there.
    """

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the most of it that fits the terminal's rows at its width."""
        view: RenderableType = ""
        for view in _views(self._figures):
            if len(console.render_lines(view, options, pad=False)) < options.size.height:
                break
        yield view


def _views(figures: Figures) -> Iterator[RenderableType]:
    """The panel with all its rows, then with fewer and fewer, at last without its border."""
    rows = _rows(figures)
    yield _panel(rows)
    rows["peers"] = Text(peers_text(figures.peers, (), {}))
    yield _panel(rows)
    for name in LEFT_OUT:
        if rows.pop(name, None) is not None:
            yield _panel(rows)
    yield _grid(rows)


def _panel(rows: Mapping[str, Text]) -> Panel:
    return Panel(_grid(rows), title="anabranch", subtitle="Ctrl-C leaves", title_align="left")


def _grid(rows: Mapping[str, Text]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _rows(figures: Figures) -> dict[str, Text]:
    """The panel's rows by name, without those that have nothing to say."""
    rows: dict[str, str | Text] = {
        "model": f"{figures.model} in network {figures.network}" if figures.model else "",
        "state": state_text(figures),
        "layers": strip(figures),
        "now": f"{counted(figures.sessions, 'session')}, {figures.tokens_per_s:.1f} tokens/s,"
        f" {counted(figures.tokens, 'token')} since the start",
        "lately": sparkline(figures.rates),
        "traffic": f"up {gibibytes(figures.up_bytes_per_s)}/s ({gibibytes(figures.up_bytes)}),"
        f" down {gibibytes(figures.down_bytes_per_s)}/s ({gibibytes(figures.down_bytes)})"
        f"{month_text(figures)}",
        "peers": peers_text(figures.peers, figures.links, figures.names),
        "waits for": missing_sentence(figures),
        "device": device_text(figures),
        "so far": contribution_text(figures.lifetime),
        "up for": elapsed_text(figures.uptime_s),
    }
    # Text: brackets in a device's name are no markup.
    return {
        name: text if isinstance(text, Text) else Text(text) for name, text in rows.items() if text
    }


def strip(figures: Figures) -> Text:
    """The model's layers from left to right: lit those of this peer, dim those of others, and a dot
    where nobody serves any of a cell's layers."""
    cells = min(figures.layers, PANEL.strip_cells_max)
    shown = Text()
    for cell in range(cells):
        layers = range(cell * figures.layers // cells, max(1, (cell + 1) * figures.layers // cells))
        if layers.start < figures.end and figures.start < layers.stop:
            serves = figures.state is NodeState.SERVING
            shown.append("█" if serves else "▒", style="bold cyan")
        elif any(figures.held[layers.start : layers.stop]):
            shown.append("▄", style="dim")
        else:
            shown.append("·", style="dim")
    return shown


def sparkline(rates: Sequence[float]) -> str:
    """The newest rates as bars, and the highest of them in words; empty where all are 0."""
    shown = rates[-PANEL.rates_shown_max :]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    bars = "".join(BARS[min(len(BARS) - 1, int(rate / top * len(BARS)))] for rate in shown)
    return f"{bars} at most {top:.1f} tokens/s"


def missing_sentence(figures: Figures) -> str:
    """The layers that nobody serves, neither this peer nor another; empty where all are served."""
    mine = range(figures.start, figures.end) if figures.state is NodeState.SERVING else range(0)
    gaps = layer_ranges(
        layer for layer, count in enumerate(figures.held) if not count and layer not in mine
    )
    return f"somebody to serve {layers_text(*gaps)}" if gaps else ""


def contribution_text(lifetime: Contribution) -> str:
    """What a peer has given, in words."""
    return (
        f"{counted(lifetime.tokens, 'token')} in {counted(lifetime.sessions, 'answer')},"
        f" {elapsed_text(lifetime.serving_s)} of serving"
    )


def month_text(figures: Figures) -> str:
    """How much of the month's traffic is used; empty where it has no limit."""
    if figures.month_bytes_max is None:
        return ""
    return f", {figures.month_bytes / 1e9:.1f} of this month's {figures.month_bytes_max / 1e9:g} GB"


def peers_text(others: int, links: Sequence[Link], names: Mapping[str, str]) -> str:
    """Number of other peers, and round trips to the nearest by name."""
    near = sorted(links, key=lambda link: link.rtt_s)[: PANEL.peers_shown_max]
    trips = ", ".join(
        f"{' '.join(printable(names.get(link.source, '')).split()) or short_name(link.source)}"
        f" {1000 * link.rtt_s:.1f} ms"
        for link in near
    )
    if not others:
        return "nobody else yet"
    return counted(others, "other") + (f": {trips}" if trips else "")


def device_text(figures: Figures) -> str:
    """The device, with temperature and power if the driver reports them."""
    parts = [figures.device]
    if figures.temperature_c is not None:
        parts.append(f"{figures.temperature_c:.0f} °C")
    if figures.power_w is not None:
        parts.append(f"{figures.power_w:.0f} W")
    return ", ".join(parts)


def elapsed_text(seconds: float) -> str:
    """A time with its units, the two largest from an hour on: ``59 s``, ``9 min``, ``3 h 07 min``,
    ``2 d 3 h``."""
    minutes, left_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min" if minutes else f"{left_s} s"
