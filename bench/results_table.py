"""Writes the README's tables from ``bench/results``: no figure is typed by hand.

``python -m bench.results_table`` replaces what stands between the README's two markers.
"""

import json
import sys
from typing import Any

from bench.local_swarm import ROOT

RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python -m bench.results_table -->", "<!-- end of figures -->"


def read(name: str) -> dict[str, Any]:
    """One result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def speed(result: dict[str, Any]) -> str:
    """A local swarm beside one process."""
    lines = [
        "| model | peers | one process, tokens/s | swarm, tokens/s | ratio | 4 streams, total"
        " | 8 streams, total | TTFT of 512 tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, by_peers in result["models"].items():
        for peers, figures in by_peers.items():
            median = figures["median"]
            ratio, swarm = median["ratio"], median["swarm"]
            lines.append(
                f"| {model} | {peers} | {median['single']['tokens_per_s']:.1f}"
                f" | {swarm['tokens_per_s']:.1f} | {ratio['one_stream']:.2f}"
                f" | {ratio['four_streams']:.2f}× | {ratio['eight_streams']:.2f}×"
                f" | {swarm['ttft_512_s']:.2f} s ({ratio['ttft_512']:.2f}×) |"
            )
    where = f"{result['cores']} cores ({result['cpu']}), torch {result['torch']}"
    return (
        f"All peers share one machine of {where}; the single process, `transformers.generate` in"
        " float32, has it to itself. Models are named by hidden size × layers, with random weights;"
        " ratios are to one stream of the single process"
        " (`python -m bench.local`, [JSON](bench/results/local.json)):\n\n" + "\n".join(lines)
    )


def cost(result: dict[str, Any]) -> str:
    """What an idle peer costs."""
    idle, seconds = result["idle_peer"], result["seconds_to_median"]
    return (
        f"An idle peer of the bundled model is {idle['processes']} processes and"
        f" {idle['pss_mib']:.0f} MiB (PSS); a peer that returns serves"
        f" {seconds['serving']:.1f} s after its command (`python -m bench.footprint`,"
        " [JSON](bench/results/footprint.json))."
    )


def losses(result: dict[str, Any]) -> str:
    """How long a loss is felt."""
    coordinator = result["coordinator_killed"]["median"]
    layers = result["layers_lost"]["median"]
    stage = result["stage_killed_mid_answer"]["median"]
    return (
        f"After SIGKILL: a coordinator is replaced after {coordinator['elected_s']:.1f} s, and the"
        f" next request is answered {coordinator['answered_s']:.1f} s after the kill; a client"
        f" names the layers that nobody holds {layers['named_s']:.2f} s after it asked, and its"
        f" answer comes {layers['answered_after_restart_s']:.1f} s after the peer was started"
        f" again; losing a stage in the middle of an answer is a gap of"
        f" {stage['longest_gap_s']:.2f} s, new plan included where nobody else held its layers"
        f" (`python -m bench.losses`,"
        " [JSON](bench/results/losses.json))."
    )


def main() -> int:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    parts = (speed(read("local")), cost(read("footprint")), losses(read("losses")))
    README.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
