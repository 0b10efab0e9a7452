"""Tables of our own experiments."""

from typing import Any

from bench.papers.report_tables import TIMES
from bench.report import table

Recipe = dict[str, Any]
Row = dict[str, Any]

HEADS = (
    "requests: | answered: | peers lost: | peers moved: | replays: | a layer without a holder, s:"
    " | tokens/s: | prompt s, P50 / P99: | token s, P50 / P99:"
)
CELLS = (
    "{requests} | {answered} | {losses} | {moves} | {replays} | {uncovered_s:.0f}"
    " | {tokens_per_s:.1f} | {prompt_p50_s:.2f} / {prompt_p99_s:.2f}"
    " | {token_p50_s:.2f} / {token_p99_s:.2f}"
)


def volunteers(recipe: Recipe) -> list[str]:
    """Stays of different lengths, with re-planning and without."""
    rate = recipe["rows"][0]["requests_per_s"]
    said = {None: "–", True: "yes", False: "no"}
    rows = [
        {"stay": f"{row['stay_h']:g} h" if row["stay_h"] else "all stay"}
        | {"said": said[row["replan"] if row["stay_h"] else None], **row}
        for row in recipe["rows"]
    ]
    return [
        f"Four hours of single24/70b under {rate:g} requests/s (Poisson, lengths of the trace)."
        " Stays are Pareto-distributed (shape 1.5) with the mean given, absences with a mean of"
        " 30 min; a loss is noticed after 2 s, layers load for 60 s. Re-planned: layers that"
        " nobody holds go to the fewest peers that must move, and who returns takes the span that"
        " is served the least; otherwise peers return to what they held. What was not answered was"
        " under way or in line at the end.",
        "",
        table(f"mean stay: | re-planned | {HEADS}", f"{{stay}} | {{said}} | {CELLS}", rows),
    ]


def cut_off(recipe: Recipe) -> list[str]:
    """A region without links to the others."""
    rate = recipe["rows"][0]["requests_per_s"]
    cut = max(row["cut"] for row in recipe["rows"])
    said = {None: "no cut", True: "re-planned", False: "not re-planned"}
    rows = [{"said": said[row["replan"]], **row} for row in recipe["rows"]]
    lines = [
        f"An hour of geo24/70b under {rate:g} requests/s; {cut} of 24 peers, one region, are cut"
        " off after 20 minutes for 20 minutes and return with what they held. Re-planned: the"
        " fewest peers that must move take the layers that nobody holds.",
        "",
        table(f"| {HEADS}", f"{{said}} | {CELLS}", rows),
    ]
    answered = {row["replan"]: row["answered"] for row in recipe["rows"]}
    if answered.get(True, 0) < answered.get(False, 0):
        lines += [
            "",
            "Re-planning **loses** in answers by the end: peers that moved keep their new layers"
            " when the region is back (a running coordinator would plan anew, the simulation does"
            " not), so the line that formed is worked off more slowly.",
        ]
    return lines


def growth(recipe: Recipe) -> list[str]:
    """More and more peers."""
    return [
        "Helix's 24 peers so many times over (100 ms between copies, names shuffled), planned as"
        " one swarm by cells, then an hour with stays of 4 h on average and absences of 30 min;"
        " requests grow with the peers.",
        "",
        table(
            "peers: | planned in s: | planner | max flow: | × real time: | requests/s: | " + HEADS,
            "{peers} | {searched_s:.0f} | {planner} | {flow_tokens_per_s:.0f}"
            f" | {{times_real:.0f}} | {{requests_per_s:.2f}} | {CELLS}",
            recipe["rows"],
        ),
    ]


def crowd(recipe: Recipe) -> list[str]:
    """A flash crowd."""
    first = recipe["rows"][0]
    return [
        f"single24/70b under {first['requests_per_s']:g} requests/s for half an hour, with"
        f" {first['crowd_per_s']:g} requests/s for three minutes of it; the same"
        f" {first['requests']} requests for everybody, run until all are answered (looked at"
        " every minute).",
        "",
        table(
            "placement | scheduler | links | all answered after s: | prompt s, mean / P50 / P99:"
            " | token s, mean / P50 / P99: | KV peak:",
            "{placement} | {scheduler} | {links} | {answered_after_s:.0f}"
            f" | {TIMES} | {{kv_peak:.2f}}",
            recipe["rows"],
        ),
    ]


def llumnix(recipe: Recipe) -> list[str]:
    """Moves for balance, priorities, and peers that leave."""
    by_key = {row["key"]: row for row in recipe["rows"]}
    return [
        "Four pipelines of four A100 with LLaMA 30B, 20 ms and 1 Gbit/s apart, each with KV"
        " room for the 13,616 tokens that one of Llumnix's instances holds; half an hour of"
        " Poisson arrivals with Pareto lengths (shape 1.2, mean 400 each, cut at 6,000), a"
        " tenth of them urgent, run until all are answered. `turns` is this project's own"
        " dispatch, `freest` Llumnix's; stages admit and give way by this project's rules, and"
        " each peer moves sessions for itself. Drains, losses and the mending of a route are the"
        " real rules. Moved gap: the token that"
        " waited longest for a move or a repair.",
        "",
        table(
            "| requests/s: | moves: | prompt s, mean / P50 / P99: | urgent prompt s, mean / P99:"
            " | token s, mean / P99: | moved gap s, P50 / max: | KV peak:",
            "{name} | {requests_per_s:g} | {moves}"
            " | {prompt_s:.2f} / {prompt_p50_s:.2f} / {prompt_p99_s:.2f}"
            " | {urgent_prompt_s:.2f} / {urgent_prompt_p99_s:.2f}"
            " | {token_s:.2f} / {token_p99_s:.2f}"
            " | {moved_gap_p50_s:.2f} / {moved_gap_max_s:.2f} | {kv_peak:.2f}",
            [{"name": key.split("/s, ")[-1], **row} for key, row in by_key.items()],
        ),
        "",
        *(_moves_worth(by_key, rate) for rate in sorted(_rates(recipe))),
        "",
        "Llumnix (16 instances of LLaMA-7B, other GPUs and traces) reports P99 times to the first"
        " token up to 15 times shorter than without migration, urgent ones up to 1.5 times shorter"
        " than the others, and 20-30 ms for a move.",
    ]


def _rates(recipe: Recipe) -> set[float]:
    return {row["requests_per_s"] for row in recipe["rows"]}


def _moves_worth(by_key: dict[str, Row], rate: float) -> str:
    """What moves gain or cost at a rate, against both dispatches without them."""
    found = [by_key.get(f"{rate:g}/s, {how}") for how in ("turns", "freest", "freest, moves")]
    if not all(found):
        return ""
    turns, freest, moved = (row["prompt_p99_s"] for row in found if row)
    said = "shorter" if moved < min(turns, freest) else "**not shorter**"
    return (
        f"- {rate:g} requests/s: P99 of prompts {turns:.2f} s by turns, {freest:.2f} s by the"
        f" freest route, {moved:.2f} s with moves: {said}."
    )
