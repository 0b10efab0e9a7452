"""Draws plots of a simulated run. Needs matplotlib."""

import importlib.util
from pathlib import Path
from typing import Any

from coordinator.simulator.core.report import SimulationReport
from dht.command_line import pip_install
from dht.errors import UserError, reason_of

LINKS_SHOWN = 30


def prepare_plots(directory: Path) -> None:
    """Make the directory. Raises UserError, also where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--plot needs matplotlib: {pip_install('matplotlib')}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--plot cannot write to {directory}: {reason_of(error)}") from None


def draw_plots(report: SimulationReport, directory: Path) -> None:
    """Write PNG files of tokens over time, peers' use, waits on links, latencies and the flow into
    a directory that :func:`prepare_plots` made."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot(*zip(*report.tokens_per_s_by_time, strict=True) or ((), ()))
    axes.set(xlabel="s", ylabel="decoded tokens/s")
    _save(pyplot, figure, directory / "tokens.png")

    figure, axes = pyplot.subplots(figsize=(10, 4))
    names = list(report.peers)
    axes.bar(names, [use.busy for use in report.peers.values()], label="busy")
    axes.plot(names, [use.kv_peak for use in report.peers.values()], "k_", label="KV peak")
    axes.tick_params(axis="x", rotation=90)
    axes.set(ylabel="share")
    axes.legend()
    _save(pyplot, figure, directory / "peers.png")

    figure, axes = pyplot.subplots(figsize=(8, 6))
    slow = sorted(report.links.items(), key=lambda item: -item[1].waited_s)[:LINKS_SHOWN]
    axes.barh([f"{a} → {b}" for (a, b), _ in slow], [use.waited_s * 1e3 for _, use in slow])
    axes.invert_yaxis()
    axes.set(xlabel="ms that a piece waited, mean")
    _save(pyplot, figure, directory / "links.png")

    figure, axes = pyplot.subplots()
    for name, values in (("prompt", report.prompt), ("next token", report.decode)):
        seconds = list(values.distribution_s)
        axes.plot(seconds, [percent / 100 for percent in range(len(seconds))], label=name)
    axes.set(xlabel="s", ylabel="share of requests", xscale="log")
    axes.legend()
    _save(pyplot, figure, directory / "latency.png")
    _flow(pyplot, report, directory / "flow.png")


def _flow(pyplot: Any, report: SimulationReport, path: Path) -> None:
    """Draw peers as bars over their layers, joined where tokens went from one to another."""
    names = sorted(report.peers, key=lambda name: (report.peers[name].start, name))
    row = {name: index for index, name in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.25 * len(names)))
    for name in names:
        use = report.peers[name]
        shade = 0.2 + 0.7 * use.busy
        axes.barh(row[name], use.layers, left=use.start, height=0.6, alpha=shade, color="C0")
    between = {pair: link for pair, link in report.links.items() if set(pair) <= set(names)}
    most = max((link.pieces for link in between.values()), default=1)
    for (tail, head), link in between.items():
        layer = report.peers[tail].start + report.peers[tail].layers
        axes.annotate(
            "",
            (layer, row[head]),
            (layer, row[tail]),
            arrowprops={
                "arrowstyle": "->",
                "linewidth": 0.3 + 3 * link.pieces / max(1, most),
                "connectionstyle": "arc3,rad=0.2",
                "alpha": 0.6,
            },
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="layer", title="what peers hold (darker: busier), and where tokens went")
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
