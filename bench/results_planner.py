"""Sentences and tables about elections, planning and the DHT, for the documents."""

from typing import Any


def elections(result: dict[str, Any]) -> str:
    """Coordinators killed one after the other, with clients asking."""
    elected, planned = result["elected_s"], result["planned_s"]
    return (
        f"{result['kills']} SIGKILLs of the coordinator of {result['peers']} peers under load:"
        f" another leads after {elected['median']:.1f} s (p95 {elected['p95']:.1f}) and has planned"
        f" after {planned['median']:.1f} s (p95 {planned['p95']:.1f}); of {result['requests']}"
        f" requests meanwhile {len(result['failed'])} failed"
        " (`python -m bench.elections`, [JSON](bench/results/elections.json))."
    )


def flood(result: dict[str, Any]) -> str:
    """Records of thousands of identities stored at one peer."""
    joins = [seconds for seconds in result["join_s"] if seconds is not None]
    return (
        f"{result['records']:,} signed records of as many identities, stored at one peer by"
        f" {result['attackers']} stock nodes: it takes {result['taken']:,} of them and"
        f" {result['memory_added_mib']:.0f} MiB more memory; honest peers that join through it"
        f" meanwhile are in after at most {max(joins):.1f} s, {result['joins_failed']} failed"
        " (`python -m bench.dht_flood`, [JSON](bench/results/dht_flood.json))."
    )


def sizes(result: dict[str, Any]) -> str:
    """The planner's seconds by the number of peers."""
    lines = [
        "| peers | limit, s | first answer, s | answer, s | serves by the estimate, tokens/s"
        " | best heuristic | gap of the flow to its bound | of the plan for flow alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in result["sizes"]:
        best, flow = each["best_heuristic_estimate_tokens_per_s"], each.get("flow_plan_gap")
        lines.append(
            f"| {each['peers']:,} ({each['cluster']}) | {each['limit_s']:.0f}"
            f" | {each['first_answer_s']:.2f} | {each['seconds']:.1f}"
            f" | {each['estimate_tokens_per_s']:.0f} | {'–' if best is None else f'{best:.0f}'}"
            f" | {each['gap']:.0%} | {'–' if flow is None else f'{flow:.0%}'} |"
        )
    return (
        "The planner on more and more peers, on one core: the first answer is what it says when its"
        " time is over before it begins. It plans for what is served, not for flow, so its flow is"
        " far from the bound on purpose"
        " (`python -m bench.placement_sizes`, [JSON](bench/results/placement_sizes.json)):\n\n"
        + "\n".join(lines)
    )
