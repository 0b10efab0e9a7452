"""Formats a serving peer's figures for its owner: a panel on a terminal, otherwise a line. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dht.identity.peer_id import short_name
from dht.messages.types import Link, NodeState
from node.owner.contribution import Contribution
from node.owner.reporter import counted, gibibytes, layers_sentence

PEERS_SHOWN_MAX = 6


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
    device: str = ""
    temperature_c: float | None = None
    power_w: float | None = None


def sentence(figures: Figures) -> str:
    """The figures as one plain line."""
    lifetime = figures.lifetime
    return (
        f"{layers_sentence(figures.start, figures.end, figures.layers, figures.state)};"
        f" {counted(figures.sessions, 'session')}, {counted(figures.tokens, 'token')},"
        f" {figures.tokens_per_s:.1f} tokens/s;"
        f" up {gibibytes(figures.up_bytes)}, down {gibibytes(figures.down_bytes)};"
        f" {counted(figures.peers, 'other peer')}; up for {elapsed_text(figures.uptime_s)};"
        f" {lifetime.tokens} tokens in all"
    )


def panel(figures: Figures) -> Panel:
    """The figures as a panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    lifetime = figures.lifetime
    rows: list[tuple[str, str]] = [
        (
            "state",
            layers_sentence(figures.start, figures.end, figures.layers, figures.state),
        ),
        (
            "now",
            f"{counted(figures.sessions, 'session')}, {figures.tokens_per_s:.1f} tokens/s,"
            f" {counted(figures.tokens, 'token')} since the start",
        ),
        (
            "traffic",
            f"up {gibibytes(figures.up_bytes_per_s)}/s ({gibibytes(figures.up_bytes)}),"
            f" down {gibibytes(figures.down_bytes_per_s)}/s ({gibibytes(figures.down_bytes)})",
        ),
        ("peers", peers_text(figures.peers, figures.links)),
        ("device", device_text(figures)),
        (
            "so far",
            f"{counted(lifetime.tokens, 'token')} in {counted(lifetime.sessions, 'answer')},"
            f" {elapsed_text(lifetime.serving_s)} of serving",
        ),
        ("up for", elapsed_text(figures.uptime_s)),
    ]
    for name, text in rows:
        grid.add_row(name, Text(text))  # Text: brackets in a device's name are no markup
    return Panel(grid, title="anabranch", subtitle="Ctrl-C leaves", title_align="left")


def peers_text(others: int, links: Sequence[Link]) -> str:
    """Number of other peers, and round trips to the nearest."""
    near = sorted(links, key=lambda link: link.rtt_s)[:PEERS_SHOWN_MAX]
    trips = ", ".join(f"{short_name(link.source)} {1000 * link.rtt_s:.1f} ms" for link in near)
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
    """``3:07`` as hours and minutes, ``2 d 03:07`` from one day on."""
    days, rest = divmod(int(seconds) // 60, 24 * 60)
    hours, minutes = divmod(rest, 60)
    return f"{days} d {hours:02}:{minutes:02}" if days else f"{hours}:{minutes:02}"
