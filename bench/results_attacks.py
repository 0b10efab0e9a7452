"""What the documents say of attacks on real peers (``bench.results_table``)."""

from typing import Any

from bench.report import made, table

CHECKS = {
    "answers": "answers",
    "time": "time to the first token",
    "memory_peak": "memory at the peak",
    "memory_after": "memory after",
    "processes": "processes",
    "joining": "joining",
    "plans": "plans",
    "clients_plans": "clients' plans",
    "gain": "gain",
    "terminals": "terminals",
}
"""Conditions of a row, in words."""


def attacks(result: dict[str, Any]) -> str:
    """Each attack, and what it cost the honest side."""
    limits, rows = result["limits"], result["rows"]
    text = (
        f"Attacks on four real peers that two callers ask all the time, on one machine of"
        f" {result['cores']} cores, which attackers share at a lower priority. A row holds where no"
        " answer failed or was wrong, no process ended, a newcomer could join, honest peers follow"
        " an honest plan, the attacker got nothing that is not for it, the 95th percentile of times"
        f" to the first token is at most {limits['ttft_times']:g} times the one before or"
        f" {limits['ttft_floor_s']:g} s longer, and no process took more than"
        f" {limits['peak_mib']:g} MiB more, or {limits['after_mib']:g} MiB after a minute, beyond"
        " what one takes in the same time without an attack. Where nothing is wrong but memory that"
        " stays, the attack is played a second time on the same peers, and counts: what an"
        " attack takes for good, it takes again"
        f" {made('hostile')}:\n\n"
    ) + table(
        "attack | sent, MB:| failed | p95 before, ms:| during:| MiB more:| after:| broken",
        "{name} | {sent_mb:.1f} | {failures} of {answers} | {ttft_before_p95_s:ms}"
        " | {ttft_during_p95_s:ms} | {more_peak_mib:.0f} | {after} | {broken}",
        [
            row
            | {
                "name": name.replace("_", " "),
                "sent_mb": row["sent"]["bytes"] / 1e6,
                "failures": len(row["failed"]),
                "after": kept(row),
                "broken": ", ".join(CHECKS[each] for each, ok in row["checks"].items() if not ok),
            }
            for name, row in rows.items()
        ],
    )
    if "soak" in result:
        text += f"\n\n{soaked(result['soak'])}"
    if result["note"]:
        text += f"\n\nMeasured {result['note']}."
    return text


def kept(row: dict[str, Any]) -> str:
    """Memory that stayed."""
    after = f"{row['more_after_mib']:.0f}"
    if "first" not in row:
        return after
    return f"{row['first']['more_after_mib']:.0f}, then {after}"


def soaked(soak: dict[str, Any]) -> str:
    """All attacks at once."""
    slopes, drawn = soak["slope_mib_per_min"], sum(soak["attacks"].values())
    return (
        f"All of them at once for {soak['minutes']:g} minutes, {drawn} drawn"
        f" at random by 8 attackers: {len(soak['failed'])} of {soak['answers']} answers failed,"
        f" {len(soak['ended'])} processes ended, memory grew by at most {max(slopes.values()):.2f}"
        " MiB per minute and process over the second half (`python -m bench.hostile --soak`)."
    )
