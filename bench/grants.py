"""``python -m bench.grants``: what a client's signature on an open costs the client and each stage.

Opens over routes of several lengths, with little and with all that travels in them: names of the
blocks of a long prompt, or its ids. A stage's cost is that of the whole check
(:mod:`dht.identity.grant`). Processor time of one thread, the least of several; bytes as on the
wire. Rows and tokens have no signature of their own.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import provenance, write
from dht.identity.grant import grant, grant_refusal
from dht.identity.peer_id import Identity
from dht.messages import codec
from dht.messages.prefix import BLOCKS_MAX, NAME_BYTES
from dht.messages.session import RouteStage, Sampling, SessionOpen

SEED = 0
STAGES = (1, 4, 20)
PROMPT_TOKENS = 32_768
"""Length of the long prompt."""
ROUNDS, TIMES = 9, 20
NOW_UNIX_S = 1_700_000_000.0


def least_s(run: Callable[[], object]) -> float:
    """The least processor time of ``run`` over ``ROUNDS`` rounds of ``TIMES``."""
    found = []
    for _ in range(ROUNDS):
        started_s = time.thread_time()
        for _ in range(TIMES):
            run()
        found.append((time.thread_time() - started_s) / TIMES)
    return min(found)


def open_of(client: Identity, stages: int) -> SessionOpen:
    """A plain open over as many stages."""
    peers = [Identity.generate().peer_id for _ in range(stages)]
    return SessionOpen(
        session="s" * 32,
        attempt=0,
        client=client.peer_id,
        fingerprint="f" * 64,
        route=tuple(
            RouteStage(peer_id=peer, start=at, end=at + 1) for at, peer in enumerate(peers)
        ),
        hop=0,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=256,
        sampling=Sampling(),
    )


def main() -> int:
    """Measure and print or write."""
    parser = argparse.ArgumentParser(prog="python -m bench.grants", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here")
    arguments = parser.parse_args()
    client = Identity.generate()
    rows: list[dict[str, Any]] = []
    for stages in STAGES:
        plain = open_of(client, stages)
        for name, open_ in {
            "plain": plain,
            "names of its blocks": replace(plain, blocks=bytes(NAME_BYTES * BLOCKS_MAX)),
            "ids of the prompt": replace(plain, prompt_ids=tuple(range(PROMPT_TOKENS))),
        }.items():
            signed = grant(open_, client.sign, NOW_UNIX_S)
            assert grant_refusal(signed, NOW_UNIX_S) is None
            row = {
                "stages": stages,
                "open": name,
                "bytes": len(codec.encode(signed)),
                "grant_bytes": len(codec.encode(signed)) - len(codec.encode(open_)),
                "client_s": least_s(lambda o=open_: grant(o, client.sign, NOW_UNIX_S)),
                "stage_s": least_s(lambda s=signed: grant_refusal(s, NOW_UNIX_S)),
            }
            rows.append(row)
            print(row, flush=True)
    write(arguments.out, {**provenance(SEED), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
