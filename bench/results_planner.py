"""What the documents say of elections, placements, planning and the DHT."""

from typing import Any

from bench.report import made, table


def elections(result: dict[str, Any]) -> str:
    """Coordinators killed one after the other, with clients asking."""
    elected, planned = result["elected_s"], result["planned_s"]
    return (
        f"{result['kills']} SIGKILLs of the coordinator of {result['peers']} peers under load:"
        f" another leads after {elected['median']:.1f} s (p95 {elected['p95']:.1f}) and has planned"
        f" after {planned['median']:.1f} s (p95 {planned['p95']:.1f}); of {result['requests']}"
        f" requests meanwhile {len(result['failed'])} failed {made('elections')}."
    )


def sizes(result: dict[str, Any]) -> str:
    """The planner's seconds by the number of peers."""
    return (
        "The planner on more and more peers, on one core, with what live peers announce: the first"
        " answer is what it says when its time is over before it begins; a coordinator's is what is"
        " adopted, checked, for peers that hold nothing, after a hundredth of those who then serve"
        " (one at least) is lost, and after that with a tenth of the others new. It plans for what"
        " is served, not for flow, so its flow is far from the bound on purpose"
        f" {made('placement_sizes')}:\n\n"
    ) + table(
        "peers | first answer, s | estimate, tokens/s: | a coordinator's, s: | estimate:"
        " | after a loss, s: | kept as it is: | planned anew: | with newcomers, s: | kept as it is:"
        " | planned anew: | within 10 s, estimate: | limit, s | answer, s | estimate:"
        " | best heuristic: | gap of the flow to its bound | of the plan for flow alone",
        "{peers:,} ({cluster}) | {first_answer_s:.2f} | {first_estimate_tokens_per_s:.0f}"
        " | {live_s:.1f} | {live_estimate_tokens_per_s:.0f} | {after_a_loss_s:.1f}"
        " | {after_a_loss_kept_tokens_per_s:.0f} | {after_a_loss_best_tokens_per_s:.0f}"
        " | {newcomers_s:.1f} | {newcomers_kept_tokens_per_s:.0f}"
        " | {newcomers_best_tokens_per_s:.0f} | {soon_estimate_tokens_per_s:.0f}"
        " | {limit_s:.0f} | {seconds:.1f}"
        " | {estimate_tokens_per_s:.0f} | {best_heuristic_estimate_tokens_per_s:.0f} | {gap:.0%}"
        " | {flow_plan_gap:.0%}",
        result["sizes"],
    )


def live_plans(result: dict[str, Any]) -> str:
    """The live planner beside simple ones, by the living rules."""
    sorts = "; ".join(
        f"{sort}: {found['rows']} clusters, median {found['median']:.2f}, least"
        f" {found['least']:.2f}, {found['below 0.98']} below 0.98; Kendall's tau of the estimate"
        f" {found['tau']['estimated']:.2f}, of short runs {found['tau']['judged']:.2f}"
        for sort, found in result["summary"].items()
    )
    published = {
        row["cluster"]: (
            row["ours"]["served"] / row["rivals"]["helix"]["served"],
            row["by_helix"]["ours"] / row["by_helix"]["helix"],
        )
        for row in result["rows"]
        if "helix" in row["rivals"]
    }
    beside = ", ".join(f"{name} {ours:.2f} and {by:.2f}" for name, (ours, by) in published.items())
    told = [row["ours"]["served"] / row["informed"] for row in result["rows"] if "informed" in row]
    return (
        "Simulated, with live inputs: what peers announce by the node's own profile code on a"
        f" stand-in device is planned in {result['limit_s'][0]:.0f} s of one core, and again in"
        f" {result['limit_s'][1]:.0f} s, which is followed where the coordinator's own trial shows"
        " a gain of 5%; decoded tokens/s under full load by the living rules, beside the best of"
        " chains of stage patterns of at most 8, 11, 14 or 20 stages with the most flow, Petals'"
        " greedy rule, SWARM's equal stages and whole replicas, all from the same inputs. Clusters"
        " are Helix's and made ones (`bench/planner/clusters.py`). Ours to the best:"
        f" {sorts}. Ours to Helix's published plan by our rules, and by Helix's, which ours is not"
        f" made for: {beside}. `informed`: what the same planner finds in 30 s from the tables that"
        f" a cluster is made of; ours serve {min(told):.2f} to {max(told):.2f} times as much"
        f" {made('live_plan')}:\n\n"
    ) + table(
        "cluster | peers: | model | ours, tokens/s: | informed: | best of the simple: | which"
        " | ratio: | Helix's plan: | ours by Helix's rules: | the simple one's: | Helix's:",
        "{cluster} | {peers} | {model} | {ours:.0f} | {informed:.0f} | {simple:.0f} | {best}"
        " | {ratio:.2f}"
        " | {helix:.0f} | {by_ours:.0f} | {by_simple:.0f} | {by_helix:.0f}",
        [
            row
            | {
                "ours": row["ours"]["served"],
                "informed": row.get("informed"),
                "simple": row["rivals"][row["best"]]["served"],
                "helix": row["rivals"].get("helix", {}).get("served"),
                "by_ours": row["by_helix"]["ours"],
                "by_simple": row["by_helix"][row["best"]],
                "by_helix": row["by_helix"].get("helix"),
            }
            for row in result["rows"]
        ],
    )


def planner_parts(result: dict[str, Any]) -> str:
    """What plans serve that were made without a part of the planner."""
    limits = sorted({float(limit) for row in result["summary"].values() for limit in row})
    return (
        "Simulated, with live inputs: plans made without a part of the planner, in so many seconds"
        " of one core; tokens/s under full load by the living rules, as a part of the whole"
        " planner's in the same time: geometric mean, and least to most of"
        f" {len({row['cluster'] for row in result['rows']})} clusters {made('planner_parts')}."
        f" {result.get('note', '')}\n\n"
    ) + table(
        " | ".join(["without", *(f"{limit:g} s" for limit in limits)]),
        " | ".join(["{part}", *(f"{{at_{nth}}}" for nth in range(len(limits)))]),
        [
            {"part": part}
            | {f"at_{limits.index(float(limit))}": _spread(found) for limit, found in row.items()}
            for part, row in result["summary"].items()
        ],
    )


def _spread(found: dict[str, float]) -> str:
    return f"{found['geometric mean']:.2f} ({found['least']:.2f}–{found['most']:.2f})"


def light_load(result: dict[str, Any]) -> str:
    """What requests wait for a token while others ask little."""
    found = result["summary"]
    full = found["full"]
    return (
        "Simulated by the living rules: a coordinator's first plan from what peers announce serves"
        " Azure's requests, which come at random at shares of the tokens/s at full load; routes are"
        " drawn as clients do, with the quickest ring while its peers have little to do, and in"
        f" turn alone. At full load the first serves {full['median']:.2f} times the tokens/s of the"
        f" second ({full['least']:.2f} to {full['most']:.2f} on {len(result['rows'])} clusters)."
        " Simulated clients know at once how many sessions each peer has, living ones some"
        " seconds later"
        f" {made('light_load')}:\n\n"
    ) + table(
        "cluster | peers: | load: | a token, ms: | in turn: | p95, ms: | in turn: | first token, s:"
        " | in turn:",
        "{cluster} | {peers} | {load:.0%} | {token:.0f} | {token_turn:.0f} | {p95:.0f}"
        " | {p95_turn:.0f} | {first:.1f} | {first_turn:.1f}",
        [
            {
                "cluster": row["cluster"],
                "peers": row["peers"],
                "load": float(share),
                **{
                    name + of: 1e3 ** (what != "prompt_s") * ways[way][what]
                    for name, what in (
                        ("token", "token_s"),
                        ("p95", "token_p95_s"),
                        ("first", "prompt_s"),
                    )
                    for way, of in (("quickest", ""), ("in turn", "_turn"))
                },
            }
            for row in result["rows"]
            for share, ways in row["loads"].items()
        ],
    )


def placements(result: dict[str, Any]) -> str:
    """Our planner beside the published plans, both in our simulator."""
    planners = ("ours", "published", "petals", "published, flow spread")
    known = result["estimate_against_simulation"]
    return (
        "On paper, by Helix's rules, which ours is not made for: placements on Helix's clusters"
        " (ASPLOS'25), planned from complete tables; decode tokens/s under full load in our event"
        " simulator, which repeats Helix's own published runs within a few percent; every planner"
        f" has {result['time_limit_s']:.0f} s at most. The estimate that chooses among plans ranks"
        f" {known['plans']} of them like the simulation (Kendall tau {known['kendall_tau']:.2f})"
        f" {made('placement')}:\n\n"
    ) + table(
        "cluster, model | ours, tokens/s | published plan, same simulator | Petals' rule"
        " | ours, flow spread over the published plan",
        "{cluster}, {model} | " + " | ".join(f"{{{planner}:.0f}}" for planner in planners),
        [
            case | {row["planner"]: row.get("simulated_tokens_per_s") for row in case["planners"]}
            for case in result["cases"]
        ],
    )


def roaming(result: dict[str, Any]) -> str:
    """Whether volunteers of many models go back and forth."""
    found, losses = result["summary"], result["losses"]
    taken = [loss["taken_after_s"] for loss in losses if "taken_after_s" in loss]
    return (
        f"{result['peers']} volunteers and five models of 8 B to 235 B parameters' shapes for"
        f" {result['minutes']:.0f} minutes (simulated; what a volunteer reads and decides is"
        " `node.join`'s, placement within a model a stand-in's): everybody who serves one model"
        " vanishes, then all holders of a layer of another;"
        f" {found['left']} left in all, {found['joined']} came, {found['moves']} moved to another"
        f" model, each {found['moves_of_one_max']} at the most; {found['returns']} went back to one"
        f" that they had left. {len(losses)} times a model lost the last holder of a layer; others"
        f" had begun to load all of them after {max(taken):.0f} s at the latest, which takes"
        f" minutes at {result['link_bytes_per_s'] / 1e6:.0f} MB/s; {found['never_whole']} were not"
        f" whole again at the end {made('roaming')}."
    )
