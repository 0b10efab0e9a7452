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


def placements(result: dict[str, Any]) -> str:
    """Our planner beside the published plans, both in our simulator."""
    lines = [
        "| cluster, model | ours, tokens/s | published plan, same simulator | Petals' rule"
        " | ours, flow spread over the published plan |",
        "|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        served = {
            row["planner"]: row["simulated_tokens_per_s"]
            for row in case["planners"]
            if row.get("simulated_tokens_per_s") is not None
        }
        cells = [
            f"{served[name]:.0f}" if name in served else "–"
            for name in ("patterns", "published", "petals", "published, flow spread")
        ]
        lines.append(f"| {case['cluster']}, {case['model']} | " + " | ".join(cells) + " |")
    known = result["estimate_against_simulation"]
    return (
        "Placements on Helix's clusters (ASPLOS'25): decode tokens/s under full load in our event"
        " simulator, which repeats Helix's own published runs within a few percent; every planner"
        f" has {result['time_limit_s']:.0f} s. The estimate that chooses among plans ranks"
        f" {known['plans']} of them like the simulation (Kendall tau {known['kendall_tau']:.2f})"
        " (`python -m bench.placement`, [JSON](bench/results/placement.json)):\n\n"
        + "\n".join(lines)
    )


def links(result: dict[str, Any]) -> str:
    """Policies for links, beside each other."""
    lines = [
        "| requests/s, Mbit/s, ms | policy | TTFT mean, p95 | TPOT mean, p95 | floor |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {cell['requests_per_s']}, {cell['mbit']:.0f}, {cell['delay_s'] * 1e3:.0f}"
        f" | {cell['policy']} | {cell['ttft_mean_s']:.2f}, {cell['ttft_p95_s']:.2f} s"
        f" | {cell['tpot_mean_s'] * 1e3:.0f}, {cell['tpot_p95_s'] * 1e3:.0f} ms"
        f" | {cell['floor']['ttft_s']:.2f} s, {cell['floor']['tpot_s'] * 1e3:.0f} ms |"
        for cell in result["rows"]
    ]
    return (
        "Links in MoLink's setting (EMNLP Findings 2025): three stages of a model with Qwen-7B's"
        " shapes over 100 Mbit/s and 30 ms, under a virtual clock; sessions, stages and link"
        " schedulers are the project's own, the engine waits as long as an RTX 4090 would"
        " (`python -m bench.papers molink`, [JSON](bench/results/papers/molink.json);"
        " [docs/results.md](docs/results.md) has other bandwidths and delays, too):\n\n"
        + "\n".join(lines)
    )


def engine(result: dict[str, Any]) -> str:
    """One engine beside transformers."""
    lines = [
        "| model | measured | engine, tokens/s | transformers, tokens/s | ratio"
        " | times the floor | times its products alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, figures in result["models"].items():
        for name, one in figures.items():
            if not isinstance(one, dict):
                continue
            floor, products = (
                f"{one[what]:.1f}" if what in one else "–"
                for what in ("times_floor", "times_products")
            )
            lines.append(
                f"| {model} | {name.replace('_', ' ')} | {one['engine']:.0f}"
                f" | {one['transformers']:.0f} | {one['ratio']:.2f} | {floor} | {products} |"
            )
    return (
        "One engine with all layers beside `transformers` in the same process: `generate` for one"
        " and for eight streams and for a prompt of 512, continuous batching for requests of mixed"
        " lengths; the floor is the weights' bytes over the measured memory bandwidth, the products"
        " are the same matrices in a bare loop"
        " (`python -m bench.engine`, [JSON](bench/results/engine.json)):\n\n" + "\n".join(lines)
    )


def chaos(result: dict[str, Any]) -> str:
    """What is felt when volunteers vanish."""
    lines = [
        "| strike | trials | tokens lost, repeated | answers that differ | requests failed"
        " | gap p50, p95, max | prefill of that history p50, max |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, name in STRIKES.items():
        if (of_kind := result.get(kind)) is None:
            continue
        lines.append(
            f"| {name} | {of_kind['trials']} | {of_kind['tokens_lost']},"
            f" {of_kind['tokens_repeated']} | {of_kind['answers_that_differ']}"
            f" | {of_kind['requests_failed']} | {of_kind['gap_p50_s']:.2f},"
            f" {of_kind['gap_p95_s']:.2f}, {of_kind['gap_max_s']:.2f} s"
            f" | {of_kind['prefill_p50_s']:.2f}, {of_kind['prefill_max_s']:.2f} s |"
        )
    return (
        f"Strikes in the middle of answers, greedy and sampled by turns: {result['peers']} real"
        " peers, every layer held twice; gaps are of answers whose route was struck"
        " (`python -m bench.chaos`, [JSON](bench/results/chaos.json)):\n\n" + "\n".join(lines)
    )


STRIKES = {
    "kill": "SIGKILL of a stage",
    "stop": "SIGSTOP of a stage",
    "black_hole": "network black-hole of a stage",
    "coordinator": "SIGKILL of the coordinator",
    "bootstrap": "SIGKILL of the bootstrap peer",
}


def overload(result: dict[str, Any]) -> str:
    """What a swarm does with too much."""
    told, rejected = result["overload"], result["overload"]["rejected_s"]
    again = "announced as free again" if result["kv_free_again"] else "not announced as free again"
    return (
        f"{result['factor']:.0f} × overload for {result['seconds']:.0f} s: goodput"
        f" {told['tokens_per_s']:.0f} tokens/s, {result['goodput_of_peak']:.0%} of the peak;"
        f" {told['rejected']} of {told['requests']} requests were rejected, after"
        f" {1e3 * rejected['p50']:.0f} ms (p95 {1e3 * rejected['p95']:.0f}, at most"
        f" {1e3 * rejected['max']:.0f}); {told['served_share_high']:.0%} of those of high priority"
        f" were served, {told['served_share_normal']:.0%} of the others;"
        f" {told['failed']} failed, {result['peers_ended']} peers ended, all KV was {again}"
        " (`python -m bench.overload`, [JSON](bench/results/overload.json))."
    )


def moves(result: dict[str, Any]) -> str:
    """What a planned move costs."""
    over, drain = result["hand_over"], result["drain"]
    slowdown = over["neighbours_slowdown_median"]
    beside = "" if slowdown is None else f"; neighbours were slower by {slowdown:.0%} (median)"
    return (
        f"Planned moves: handing over a stage of a session of {result['session_tokens']} tokens is"
        f" a gap of {over['gap_of_usual_median']:.1f} times its usual time per token (median of"
        f" {len(result['rounds'])}; at most {over['gap_of_usual_max']:.1f}; without a move the"
        f" longest is {over['undisturbed_longest_of_usual_median']:.1f} times){beside}; a peer with"
        f" {drain['live_sessions']} live sessions had left {drain['memory_free_s']:.1f} s after it"
        f" was asked to; {over['answers_that_differ'] + drain['differ']} answers differed"
        " (`python -m bench.moves`, [JSON](bench/results/moves.json))."
    )


LATER = {
    "chaos": chaos,
    "overload": overload,
    "moves": moves,
    "placement": placements,
    "papers/molink": links,
    "engine": engine,
}
"""Tables that are left out while nobody has run their benchmark."""


def main() -> int:
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    parts = [speed(read("local")), cost(read("footprint")), losses(read("losses"))]
    parts += [
        write(read(name)) for name, write in LATER.items() if (RESULTS / f"{name}.json").exists()
    ]
    README.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
