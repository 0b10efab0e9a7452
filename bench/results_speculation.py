"""What docs/measurements.md says of drafts around the ring (``bench.results_table``)."""

from typing import Any

from bench.report import made, table


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of all parts: by model, setting and text."""
    return [
        {"model": name, "trip": trip, "text": text, "identical": True, **row}
        for part, name in MODELS.items()
        for trip, texts in result.get(part, {}).items()
        for text, row in texts.items()
    ]


def speculation(result: dict[str, Any]) -> str:
    """Tokens/s with and without drafts, and how often drafts are right."""
    rows = rows_of(result)
    differ = sum(not row["identical"] for row in rows)
    noise = max(abs(row["gain"] - 1) for row in rows if row["text"] == "random")
    by_place = result["accepted_by_place"]
    loaded = result.get("full_load", {})
    of_kinds = [(text, row) for text, row in loaded.items() if isinstance(row, dict)]
    gains = ", ".join(f"{row['gain']:.2f} × on {text}" for text, row in of_kinds)
    return (
        "Three stages in network namespaces with round trips between them as named and 100 Mbit/s,"
        " one answer at a time, with drafts and without. The stand-in waits as long as a model of"
        " 8 B (fp16) or 70 B (4 bits) on three RTX 3090s would and says given texts (simulated);"
        f" brook is the bundled model, on this machine's {result['cores']} cores. On random text"
        f" nothing is drafted, and yet the two differ by up to {noise:.0%}. On paper is the same"
        " under a virtual clock."
        f" {differ} of {len(rows)} answers differed from those"
        f" without drafts {made('speculation')}:\n\n"
        + table(
            "model | setting | text | tokens/s without: | with: | gain:",
            "{model} | {trip} | {text} | {plain_tokens_per_s:.1f} | {drafted_tokens_per_s:.1f}"
            " | {gain:.2f} ×",
            rows,
        )
        + "\n\nShare of right drafts where all before them were right, by place in the draft (the"
        " suffix drafter over these texts, whether or not it pays to send them):\n\n"
        + table(
            "text | 1st: | 2nd: | 4th: | 8th: | 15th:",
            "{text} | {first:.2f} | {second:.2f} | {fourth:.2f} | {eighth:.2f} | {last:.2f}",
            [
                {
                    "text": text,
                    "first": shares[0],
                    "second": shares[1],
                    "fourth": shares[3],
                    "eighth": shares[7],
                    "last": shares[14],
                }
                for text, shares in by_place.items()
            ],
        )
        + (
            f"\n\nUnder full load, {loaded['answers']} such answers at once (virtual clock, same"
            f" stand-in), drafts gained {gains}."
            if loaded
            else ""
        )
    )


def draft_model(result: dict[str, Any]) -> str:
    """Tokens/s with brook's drafter and without, and how many of its drafts were accepted."""
    rows = [
        {"setting": setting, "text": text, **row}
        for setting, texts in result["on_paper"].items()
        for text, row in texts.items()
    ]
    differ = sum(not row["identical"] for row in rows)
    return (
        "Brook's own stories with the drafter that is bundled with it: the tokens are real, and so"
        " are the drafts; time is simulated: stages of an 8 B model on RTX 3090s, 3 ms for a"
        " drafted token, 100 Mbit/s and round trips as named between the stages, one answer at a"
        " time."
        f" In {differ} of {len(rows)} rows an answer differed from that without drafts"
        f" {made('draft_model')}:\n\n"
        + table(
            "stages, round trip | text | tokens/s without: | with: | gain: | accepted:",
            "{setting} | {text} | {plain_tokens_per_s:.1f} | {drafted_tokens_per_s:.1f}"
            " | {gain:.2f} × | {accepted:.0%}",
            rows,
        )
    )


MODELS = {
    "alone": "stand-in, on paper",
    "stand_in": "stand-in",
    "brook": "brook",
    "brook_drafter": "brook and its drafter",
}
