"""Writes the tables of README.md and docs/measurements.md from ``bench/results``: no figure is
typed by hand.

``python -m bench.results_table`` replaces what stands between the two markers of each document. A
result that nobody has made yet is left out.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from bench.local_swarm import ROOT
from bench.results_planner import elections, flood, sizes
from bench.results_sessions import (
    balance,
    chaos,
    fleet,
    healing,
    moves,
    moves_apart,
    moves_between_processes,
    overload,
    storms,
)
from bench.results_stale import warning

RESULTS = ROOT / "bench" / "results"
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


def real_links(result: dict[str, Any]) -> str:
    """The same policies between real processes."""
    lines = [
        "| policy | requests | TTFT mean, p95 | TPOT mean, p95 | under the virtual clock | floor |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['policy']} | {row['requests']}"
        f" | {row['ttft_mean_s']:.2f}, {row['ttft_p95_s']:.2f} s"
        f" | {1e3 * row['tpot_mean_s']:.0f}, {1e3 * row['tpot_p95_s']:.0f} ms"
        f" | {row['virtual_clock']['ttft_mean_s']:.2f} s,"
        f" {1e3 * row['virtual_clock']['tpot_mean_s']:.0f} ms"
        f" | {row['floor']['ttft_s']:.2f} s, {1e3 * row['floor']['tpot_s']:.0f} ms |"
        for row in result["rows"]
    ]
    return (
        "MoLink's setting once more, 0.3 requests/s over 100 Mbit/s and 30 ms, now with"
        f" {result['what']} (`python -m bench.wan_real`,"
        " [JSON](bench/results/wan_real.json)):\n\n" + "\n".join(lines)
    )


def links_in_short(result: dict[str, Any]) -> str:
    """One cell of the table above: MoLink's own, in a sentence."""
    cells = {
        cell["policy"]: cell
        for cell in result["rows"]
        if (cell["requests_per_s"], cell["mbit"]) == (0.3, 100.0)
    }
    told = [
        f"{name} {cell['ttft_mean_s']:.2f} s and {1e3 * cell['tpot_mean_s']:.0f} ms"
        for name, policy in (
            ("in order of arrival", "fifo"),
            ("by MoLink's rules", "molink"),
            ("by ours", "anabranch"),
            ("with rows of 8 bits", "anabranch+int8"),
        )
        if (cell := cells[policy])
    ]
    floor = cells["anabranch"]["floor"]
    return (
        "Mean time to the first token and per token in MoLink's setting (three stages, 100 Mbit/s,"
        f" 30 ms, 0.3 requests/s; on paper): {', '.join(told)}; physics allows"
        f" {floor['ttft_s']:.2f} s and {1e3 * floor['tpot_s']:.0f} ms"
        " (`python -m bench.papers molink`, [JSON](bench/results/papers/molink.json)).\n\n"
        "The engine beside `transformers`, links and hops: [docs/measurements.md]"
        "(docs/measurements.md)."
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
            times = (one.get("times_floor"), one.get("times_products"))
            floor, products = ("–" if each is None else f"{each:.1f}" for each in times)
            spread = (
                "".join(f" ({low} to {high})" for low, high in [one["ratio_quartiles"]])
                if "ratio_quartiles" in one
                else ""
            )
            lines.append(
                f"| {model} | {name.replace('_', ' ')} | {one['engine']:.0f}"
                f" | {one['transformers']:.0f} | {one['ratio']:.2f}{spread}"
                f" | {floor} | {products} |"
            )
    if "seconds" in result:
        told = f"By {result['seconds']}, while others used the machine"
        return f"{told} (`{result['command']}`):\n\n" + "\n".join(lines)
    return (
        "One engine with all layers beside `transformers` in the same process: `generate` for one"
        " and for eight streams and for a prompt of 512, continuous batching for requests of mixed"
        " lengths; ratios are medians of rounds that alternate, with their quartiles where they are"
        f" known; the engine as of {result['commit']}; the floor is"
        " the weights' bytes over the measured memory bandwidth, the products are the same matrices"
        " in a bare loop"
        " (`python -m bench.engine`, [JSON](bench/results/engine.json)):\n\n" + "\n".join(lines)
    )


def measured_links(result: dict[str, Any]) -> str:
    """What a swarm knows of its links."""
    return (
        f"{len(result['links'])} directed links between five peers in network namespaces (10 to"
        " 100 Mbit/s, round trips of 10 to 80 ms), as anybody reads them from the DHT: bandwidths"
        f" are off by {result['bandwidth_error_max']:.0%} at most, round trips by"
        f" {result['rtt_error_max']:.0%} (`python -m bench.links`,"
        " [JSON](bench/results/links.json))."
    )


def hop(result: dict[str, Any]) -> str:
    """What the daemon costs beside TCP, and beside any daemon at all."""
    lines = ["| | TCP | two plain relays and a cipher | p2p daemon |", "|---|---|---|---|"]
    for name, (title, unit) in HOP.items():
        cells = [f"{result['tcp'][name]:.3g} {unit}"]
        cells += [
            f"{result[kind][name]:.3g} {unit} ({result[f'{kind}_costs_times'][name]:.1f}×)"
            for kind in ("relayed", "p2p")
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return (
        "A hop on loopback, medians; a process on either side that relays and encrypts"
        " (`bench/relay.py`) is the least that any daemon costs"
        " (`python -m bench.transport`, [JSON](bench/results/transport.json)):\n\n"
        + "\n".join(lines)
    )


def light_hop(result: dict[str, Any]) -> str:
    """What a hop costs between light peers and others."""
    medians = result["medians"]
    pairs = [pair for pair in medians if pair != "tcp"]
    heads = " | ".join(pair.replace("_to_", " → ") for pair in pairs)
    lines = [f"| | TCP | {heads} |", "|---" * (len(pairs) + 2) + "|"]
    for name, (title, unit) in HOP.items():
        cells = " | ".join(f"{medians[pair][name]:.3g} {unit}" for pair in ("tcp", *pairs))
        lines.append(f"| {title} | {cells} |")
    return (
        "The same with light peers (py-libp2p, no daemon); who sends → who receives"
        " (`python -m bench.light_transport`, [JSON](bench/results/light_transport.json)):\n\n"
        + "\n".join(lines)
    )


HOP = {
    "round_trip_4_kib_ms": ("round trip of 4 KiB", "ms"),
    "round_trip_16_kib_ms": ("round trip of 16 KiB", "ms"),
    "mb_per_s": ("throughput", "MB/s"),
    "cpu_ms_per_mb": ("processor time per MB, both sides", "ms"),
}


def int8(result: dict[str, Any]) -> str:
    """What rows in eight bits do to answers."""
    lines = [
        "| rows on the wire | logit error mean, max | same top token | greedy answers equal"
        " | loss changes by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {wire['logit_error_mean']:.4f}, {wire['logit_error_max']:.3f}"
        f" | {wire['top_token_agrees']:.2%} | {wire['greedy_answers_equal']:.0%}"
        f" | {wire['loss_change']:+.1e} |"
        for name, wire in result["wires"].items()
    ]
    return (
        f"Rows of 8 bits between stages (`--int8-rows`), bundled model, {result['prompts']}"
        f" prompts, beside float32; logits spread by {result['logit_spread']:.1f}"
        " (`python -m bench.int8`, [JSON](bench/results/int8.json)):\n\n" + "\n".join(lines)
    )


def groups(result: dict[str, Any]) -> str:
    """Whether fewer sessions a step, and so several groups in flight, would help."""
    cells = result["cells"]
    sizes = sorted({cell["decodes_max"] for cell in cells}, reverse=True)
    lines = [
        "| step, delay | " + " | ".join(f"{size} a step" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for step_ms, delay_ms in sorted({(cell["step_ms"], cell["delay_ms"]) for cell in cells}):
        served = {
            cell["decodes_max"]: cell["tokens_per_s"]
            for cell in cells
            if (cell["step_ms"], cell["delay_ms"]) == (step_ms, delay_ms)
        }
        row = " | ".join(f"{served[size]:.0f}" for size in sizes)
        lines.append(f"| {step_ms:.0f} ms, {delay_ms:.0f} ms | {row} |")
    return (
        f"Micro-batches, tokens/s: {result['what']}. No size wins everywhere, and on links of"
        " volunteers whatever is ready is as good as any, so that is what stages do"
        " (`python -m bench.wan groups`, [JSON](bench/results/wan_groups.json)):\n\n"
        + "\n".join(lines)
    )


DOCUMENTS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "README.md": {
        "local": speed,
        "footprint": cost,
        "losses": losses,
        "chaos": chaos,
        "elections": elections,
        "overload": overload,
        "storm": storms,
        "moves": moves,
        "moves_virtual": moves_apart,
        "moves_real": moves_between_processes,
        "placement": placements,
        "papers/molink": links_in_short,
    },
    "docs/measurements.md": {
        "engine": engine,
        "engine_processor": engine,
        "papers/molink": links,
        "wan_real": real_links,
        "wan_groups": groups,
        "balance_virtual": balance,
        "int8": int8,
        "links": measured_links,
        "transport": hop,
        "light_transport": light_hop,
        "placement_sizes": sizes,
        "dht_flood": flood,
        "fleet_12": fleet,
        "fleet_24": fleet,
        "healing": healing,
    },
}
"""Which figures stand where, in this order."""
TITLES = {
    "engine": "## The engine\n\n",
    "papers/molink": "## Links, on paper\n\n",
    "wan_real": "## Links, between real processes\n\n",
    "wan_groups": "## Micro-batches\n\n",
    "balance_virtual": "## Moves for balance\n\n",
    "int8": "## Rows of 8 bits\n\n",
    "links": "## What a swarm knows of its links\n\n",
    "transport": "## A hop\n\n",
    "light_transport": "## A hop without the daemon\n\n",
    "placement_sizes": "## Planning more and more peers\n\n",
    "dht_flood": "## A flood of records\n\n",
    "fleet_12": "## A dozen and more real peers\n\n",
    "healing": "## Swarms that were cut\n\n",
}


def from_(document: str, text: str) -> str:
    """``text`` with its links, which start at the root, as they must be in ``document``."""
    if not document.startswith("docs/"):
        return text
    return text.replace("](bench/", "](../bench/").replace("](docs/", "](")


def recorded() -> dict[str, dict[str, Any]]:
    """Every result file by its name."""
    return {
        str(path.relative_to(RESULTS).with_suffix("")): json.loads(path.read_text())
        for path in sorted(RESULTS.rglob("*.json"))
    }


def main() -> int:
    for document, parts in DOCUMENTS.items():
        path = ROOT / document
        before, rest = path.read_text().split(BEGIN)
        _, after = rest.split(END)
        titles = TITLES if document.startswith("docs/") else {}
        texts = [
            titles.get(name, "") + from_(document, write(read(name)))
            for name, write in parts.items()
            if (RESULTS / f"{name}.json").exists()
        ]
        if titles:
            texts.append(warning(recorded()))
        path.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(texts) + f"\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
