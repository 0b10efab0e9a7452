"""What the README says of sessions: strikes, storms, moves, overload (``bench.results_table``)."""

import statistics
from typing import Any

from bench.report import made, table


def chaos(result: dict[str, Any]) -> str:
    """What is felt when volunteers vanish."""
    return (
        "Strikes in the middle of answers, greedy and sampled by turns:"
        f" {' or '.join(map(str, result['peers']))} real peers on one machine of"
        f" {result['cores']} cores, every layer held at least twice; gaps are of answers whose"
        f" route was struck {made('chaos')}:\n\n"
    ) + table(
        "strike | trials | tokens lost, repeated | answers that differ | requests failed"
        " | gap p50, p95, max | prefill of that history p50, max",
        "{name} | {trials} | {tokens_lost}, {tokens_repeated} | {answers_that_differ}"
        " | {requests_failed} | {gap_p50_s:.2f}, {gap_p95_s:.2f}, {gap_max_s:.2f} s"
        " | {prefill_p50_s:.2f}, {prefill_max_s:.2f} s",
        [{"name": name, **result[kind]} for kind, name in STRIKES.items() if kind in result],
    )


STRIKES = {
    "kill": "SIGKILL of a stage",
    "stop": "SIGSTOP of a stage",
    "black_hole": "network black-hole of a stage",
    "coordinator": "SIGKILL of the coordinator",
    "bootstrap": "SIGKILL of the bootstrap peer",
}


def storms(result: dict[str, Any]) -> str:
    """Whole swarms under everything at once."""
    struck, did = sum(result["strikes"].values()), result["did"]
    return (
        f"Storms under a virtual clock: {result['seeds']} seeds, {struck} peers killed, frozen, cut"
        f" off, stuck, filled up or made to leave under {result['answers']} answers; in every"
        " fourth seed tokens are drafted, and the model of every fourth keeps a state;"
        f" {did['failovers']} failovers, {did.get('move_by_copy', 0)} moves by copied KV and"
        f" {did.get('move_by_replay', 0)} by replay; {len(result['failed_seeds'])} seeds had an"
        f" answer that was wrong or KV that was not freed, {result['replayed']} were run twice and"
        f" {len(result['replayed_differently'])} differed {made('storm')}."
    )


def fleet(result: dict[str, Any]) -> str:
    """What people see of a dozen and more real peers."""
    found, peers = result["summary"], result["peers"]
    asked = [found[part] for part in ("before_kills", "after_kills")]
    both = found["answered_after_both_s"]
    quiet = [each for each in found["quiet"] if each is not None]
    rounds = f"{len(result['rounds'])} rounds"
    killed = sum(each["failed_as_the_entry_was_lost"] for each in asked)
    as_killed = (
        f" ({killed} of them as the only peer that they knew was killed while they entered)"
        if killed
        else ""
    )
    if result["churn"]:
        rounds = f"with {sum(found['strikes'].values())} strikes: peers come, leave and are killed"
    text = (
        f"{peers} real peers on one machine of {result['cores']} cores that know the founder's"
        f" address alone, {rounds}: {sum(each['asked'] for each in asked)}"
        f" answers asked through every peer by turns, each by a new client,"
        f" {sum(len(each['failed']) for each in asked)} failed{as_killed},"
        f" {sum(len(each['hangs']) for each in asked)} silences above 5 s; a client connects in"
        f" {asked[0]['connect_s']['p50']:.2f} s (median, {asked[0]['connect_s']['max']:.2f} s at"
        f" most); {found['peers_served']} of {found['peers_started']} peers served,"
        f" {len(found['untold'])} waited for more than a minute without being told why; after"
        " SIGKILL of leader and founder together the next answer came after"
        f" {both['p50']:.1f} s (median, {both['max']:.1f} s at most)"
    )
    if quiet:
        cpu = [each["cpu_percent_of_a_core"] for each in quiet]
        text += (
            "; with nobody asking a peer and its daemon take"
            f" {statistics.median(each['mean'] for each in cpu):.2f}% of a core (median of the"
            f" rounds' means; {max(each['max'] for each in cpu):.1f}% at most, who coordinates)"
        )
    if result["note"]:
        text += f"; measured {result['note']}"
    command = f"fleet --peers {peers}" + " --churn" * result["churn"]
    return f"{text} {made(f'fleet_{peers}', command)}."


def moves(result: dict[str, Any]) -> str:
    """What a planned move costs."""
    over, drain = result["hand_over"], result["drain"]
    slowdown = over["neighbours_slowdown_median"]
    shared = ", as all peers share this machine's cores"
    beside = (
        "" if slowdown is None else f"; neighbours were slower by {slowdown:.0%} (median){shared}"
    )
    return (
        f"Planned moves: handing over a stage of a session of {result['session_tokens']} tokens is"
        f" a gap of {over['gap_of_usual_median']:.1f} times its usual time per token (median of"
        f" {len(result['rounds'])}; at most {over['gap_of_usual_max']:.1f}; without a move the"
        f" longest is {over['undisturbed_longest_of_usual_median']:.1f} times){beside}; a peer with"
        f" {drain['live_sessions']} live sessions had left {drain['memory_free_s']:.1f} s after it"
        f" was asked to; {over['answers_that_differ'] + drain['differ']} answers differed"
        f" {made('moves')}."
    )


def _best_streams(result: dict[str, Any]) -> str:
    peaks = result["peak_tokens_per_s"]
    return max(peaks, key=lambda streams: peaks[streams])


def _processors(result: dict[str, Any]) -> str:
    peaks, under = result["peak_processors_busy"], result["overload_processors_busy"]
    best = peaks[_best_streams(result)]
    return (
        f" Peers kept {under['peers']:.2f} of {result['cores']} cores busy and those who ask"
        f" {under['askers']:.2f}, at the peak {best['peers']:.2f} and {best['askers']:.2f}."
    )


def _first_tokens(result: dict[str, Any]) -> str:
    def told(first: dict[str, float]) -> str:
        return f"{first['p50']:.1f} s (p95 {first['p95']:.1f}, at most {first['max']:.1f})"

    best = _best_streams(result)
    return (
        f" First tokens came after {told(result['overload']['ttft_s'])}, at the peak, {best}"
        f" answers at once, after {told(result['peak_ttft_s'][best])}."
    )


def overload(result: dict[str, Any]) -> str:
    """What a swarm does with too much."""
    told, rejected = result["overload"], result["overload"]["rejected_s"]
    late = told["begun_late_s"]
    note = f"; {result['note']}" if result["note"] else ""
    again = "announced as free again" if result["kv_free_again"] else "not announced as free again"
    return (
        f"{result['factor']:.0f} × overload for {result['seconds']:.0f} s: goodput"
        f" {told['tokens_per_s']:.0f} tokens/s, {result['goodput_of_peak']:.0%} of the peak;"
        f" {told['rejected']} of {told['requests']} requests were rejected, after"
        f" {1e3 * rejected['p50']:.0f} ms (p95 {1e3 * rejected['p95']:.0f}, at most"
        f" {1e3 * rejected['max']:.0f}; {told['rejected_within_100_ms']:.2%} within 100),"
        f" {told['told_when_to_come_back']:.0%} of them with when to come back;"
        f" {told['served_share_high']:.0%} of those of high priority"
        f" were served, {told['served_share_normal']:.0%} of the others;"
        f" {told['failed']} failed, {result['peers_ended']} peers ended, all KV was {again}."
        f"{_first_tokens(result)}{_processors(result)}"
        f" Requests were begun {1e3 * late['p50']:.0f} ms late (p95 {1e3 * late['p95']:.0f})"
        f"{note} {made('overload')}."
    )


def full_load(result: dict[str, Any]) -> str:
    """What drafts and kept prefixes cost where they cannot help."""
    rate, cost = result["default_of_plain"], result["processor_s_default_of_plain"]
    return (
        f"Full load of random prompts ({result['streams']} answers at once, windows of"
        f" {result['window_s']:.0f} s that take turns, {len(result['tokens_per_s']['plain'])} of"
        " each): with drafts and kept prefixes, as answers are by default,"
        f" {rate['ratio']:.3f} ± {rate['standard_error']:.3f} times the tokens/s of plain ones, and"
        f" {cost['ratio']:.3f} ± {cost['standard_error']:.3f} times the peers' processor time per"
        f" token {made('overload_ablated', 'overload --ablate')}."
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
        f" {made('losses')}."
    )


def prefix(result: dict[str, Any]) -> str:
    """What it saves to keep KV behind a session."""
    talks = result["talks"]
    rows = [
        {
            "name": f"{name}: {talk['turns']} turns over {talk['history']:,} tokens",
            "since": f"{talk['ttft_mean_of_off_since']:.2f}" if talk["kills"] else "–",
            "struck": f"{talk['ttft_of_off_when_struck']:.2f}" if talk["kills"] else "–",
            **talk,
        }
        for name, talk in talks.items()
    ]
    differ = sum(talk["answers_that_differ"] for talk in talks.values())
    strangers = sum(talk["another_salt"]["cached_tokens"] for talk in talks.values())
    return (
        "Turns after the first with and without the prefix cache: six real peers, two for each of"
        f" three stages, {result['rtt_ms']:.0f} ms round trips, a random Llama in float32 on one"
        f" machine of {result['cores']} cores; {differ} answers differ, another salt found"
        f" {strangers} tokens {made('prefix')}:\n\n"
    ) + table(
        "conversation | first token with, without (median) | with : without, mean | of these since"
        " the stage was killed | the turn that met it | rows run per new row",
        "{name} | {ttft_on_median_s:.2f}, {ttft_off_median_s:.2f} s | {ttft_mean_of_off:.2f}"
        " | {since} | {struck} | {rows_of_new:.2f}",
        rows,
    )
