"""Reads requests from traces, samples them as Helix does, and makes arrivals at a rate."""

import csv
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from dht.errors import UserError

INPUT_TOKENS = (4, 2048)
OUTPUT_TOKENS = (4, 1024)
"""Bounds within which Helix and MoLink keep a trace's requests (Helix §6.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What made up traces are like, and how long they may be."""

    requests_max: int = 10_000_000
    together: float = 0.55
    """Correlation of the two, each as a normally distributed number."""
    span_s: float = 3.0
    """Length of the spans in which Helix counts a trace's arrivals."""


TRACES = TraceConfig()


AT = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
INPUT_QUANTILES = (
    7,
    27,
    181,
    203,
    378,
    397,
    412,
    447,
    947,
    1004,
    1029,
    1072,
    1121,
    1273,
    1353,
    1911,
    2047,
)
OUTPUT_QUANTILES = (7, 14, 52, 68, 87, 97, 115, 133, 157, 181, 217, 394, 407, 429, 463, 608, 1000)
"""Lengths in tokens of the Azure trace's prompts and answers, at the probabilities ``AT``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    urgent: bool = False


def read_trace(data: bytes) -> tuple[Request, ...]:
    """The requests of a CSV with ``arrival_s,input_tokens,output_tokens``.

    Raises UserError, in one line.
    """
    try:
        rows = csv.DictReader(io.StringIO(data.decode()))
        found = tuple(
            Request(
                arrival_s=float(row["arrival_s"]),
                input_tokens=int(row["input_tokens"]),
                output_tokens=int(row["output_tokens"]),
            )
            for row in rows
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"not a trace (a CSV with arrival_s,input_tokens,output_tokens): {error!r}"
        ) from error
    if not 0 < len(found) <= TRACES.requests_max:
        raise UserError(f"the trace has {len(found)} requests; give 1 to {TRACES.requests_max}")
    for request in found:
        if request.input_tokens < 1 or request.output_tokens < 1 or not request.arrival_s >= 0:
            raise UserError(f"the trace has a request without tokens or time: {request}")
    return found


def as_in_papers(trace: Sequence[Request]) -> tuple[Request, ...]:
    """The requests that Helix and MoLink keep, in order."""
    return tuple(
        request
        for request in trace
        if INPUT_TOKENS[0] <= request.input_tokens <= INPUT_TOKENS[1]
        and OUTPUT_TOKENS[0] <= request.output_tokens <= OUTPUT_TOKENS[1]
    )


def sampled(trace: Sequence[Request], seed: int) -> Iterator[Request]:
    """Requests drawn from a trace at random with replacement, for ever (Helix §6.2)."""
    draw = random.Random(seed)  # noqa: S311 (a simulation, not a secret)
    while True:
        yield trace[draw.randint(0, len(trace) - 1)]


def resampled(
    trace: Sequence[Request], *, tokens_per_s: float, duration_s: float, seed: int
) -> tuple[Request, ...]:
    """Arrivals as in Helix's online runs (§6.2), with ``tokens_per_s`` on average.

    The trace's arrival counts per span of three seconds are drawn at random and scaled; lengths are
    drawn from the trace.
    """
    draw = random.Random(seed)  # noqa: S311
    last_s = max(request.arrival_s for request in trace)
    counts = [0] * max(1, int(last_s // TRACES.span_s) + 1)
    for request in trace:
        counts[int(request.arrival_s // TRACES.span_s)] += 1
    mean_tokens = sum(r.input_tokens + r.output_tokens for r in trace) / len(trace)
    scale = TRACES.span_s * (tokens_per_s / mean_tokens) / (sum(counts) / len(counts))
    found: list[Request] = []
    rest = 0.0
    for span in range(int(duration_s // TRACES.span_s)):
        wanted = counts[draw.randint(0, len(counts) - 1)] * scale + rest
        count = round(wanted)
        rest = wanted - count
        for at_s in sorted((span + draw.random()) * TRACES.span_s for _ in range(count)):
            lengths = trace[draw.randint(0, len(trace) - 1)]
            found.append(
                Request(
                    arrival_s=at_s,
                    input_tokens=lengths.input_tokens,
                    output_tokens=lengths.output_tokens,
                )
            )
    return tuple(found)


@cache
def typical(count: int = 1024) -> tuple[Request, ...]:
    """Synthetic requests of a conversation service, for ranking plans without a trace.

    Lengths have the quantiles of the Azure conversation trace of 2023 within the papers' bounds,
    and about its correlation: long prompts get long answers.
    """
    draw = random.Random(0)  # noqa: S311  the same requests in every run
    found = []
    for _ in range(count):
        asked = draw.gauss(0, 1)
        answered = TRACES.together * asked + math.sqrt(1 - TRACES.together**2) * draw.gauss(0, 1)
        found.append(
            Request(
                arrival_s=0.0,
                input_tokens=_quantile(INPUT_QUANTILES, asked),
                output_tokens=_quantile(OUTPUT_QUANTILES, answered),
            )
        )
    return tuple(found)


def _quantile(table: Sequence[int], normal: float) -> int:
    """The length at the place that ``normal`` has among normally distributed numbers."""
    place = NormalDist().cdf(normal)
    after = next(i for i, at in enumerate(AT[1:], start=1) if place <= at)
    share = (place - AT[after - 1]) / (AT[after] - AT[after - 1])
    return round(table[after - 1] + share * (table[after] - table[after - 1]))
