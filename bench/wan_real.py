"""The same stages on real networks: processes in namespaces, over links as slow as MoLink's.

    sudo python -m bench.wan_real [--policies fifo anabranch …] [--out bench/results/wan_real.json]

Where :mod:`bench.papers.links` runs under a virtual clock, here each stage is a process in a
namespace of its own with its own p2p daemon, and packets cross links of a set rate and delay
(:mod:`bench.wan_lab`). The engine is the same stand-in (:mod:`bench.timed_engine`), as are the
requests, so what differs between the two is the network and the transport alone. Policies are run
one after the other and added to the file of ``--out``.
"""

import argparse
import asyncio
import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.papers.links import POLICIES
from bench.report import provenance, write
from bench.results_links import real_links
from bench.stand_in import (
    SPANS,
    Request,
    Served,
    Setting,
    ask,
    client_of,
    floor,
    requests,
    serve,
    stand_in_peer,
    summary,
)
from bench.wan_lab import Shape, WanLab, why_not
from dht.command_line import loop_factory
from dht.daemon.transport import HivemindTransport
from dht.identity.peer_id import Identity
from dht.transport.config import TransportConfig

NEAR = Shape(mbit=1000, delay_ms=0.1)
"""The client's links to all stages."""
CLIENT = len(SPANS)
END_S = 900.0
"""After which a cell that has not ended is given up."""


async def transport_on(host: str, peers: tuple[str, ...]) -> HivemindTransport:
    """A peer's daemon that listens on ``host`` and knows ``peers``."""
    return await HivemindTransport.create(
        TransportConfig(identity=Identity.generate(), host=host, initial_peers=peers)
    )


async def run_stage(number: int, setting: Setting, host: str, peers: tuple[str, ...]) -> None:
    """Print this stage's address and serve until stdin closes."""
    transport = await transport_on(host, peers)
    await stand_in_peer(transport, SPANS[number], setting)
    print(transport.addresses[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


async def run_client(setting: Setting, host: str, peers: tuple[str, ...]) -> list[Served]:
    """Ask the setting's requests at their times."""
    async with client_of(await transport_on(host, peers)) as client:
        # The first answer opens the links between the stages; it is not counted.
        await ask(client, Request(at_s=0.0, prompt_tokens=16, new_tokens=4))
        return list(await asyncio.gather(*(ask(client, each) for each in requests(setting))))


def stages(lab: WanLab, setting: Setting) -> AbstractContextManager[list[str]]:
    """The three stages, each on its host; gives their addresses."""
    return lab.stages(
        len(SPANS),
        lambda number, before: _command(setting, lab.address(number), before, stage=number),
    )


def _command(
    setting: Setting, host: str, peers: list[str], *, stage: int | None = None
) -> list[str]:
    job = {"setting": asdict(setting), "host": host, "peers": peers, "stage": stage}
    return [sys.executable, "-m", "bench.wan_real", "--job", json.dumps(job)]


def measure(setting: Setting) -> dict[str, Any]:
    """One row: what people waited for, beside the same under the virtual clock and the floor."""
    with WanLab(len(SPANS) + 1, NEAR) as lab:
        link = Shape(mbit=setting.mbit, delay_ms=setting.delay_s * 1e3)
        for one in range(len(SPANS)):
            for other in range(len(SPANS)):
                if one != other:
                    lab.shape(one, other, link)
        with stages(lab, setting) as addresses:
            command = _command(setting, lab.address(CLIENT), addresses)
            said = json.loads(lab.output(CLIENT, command, END_S))
    told = [Served(**{**each, "request": Request(**each["request"])}) for each in said]
    return {
        "policy": setting.policy,
        "requests_per_s": setting.requests_per_s,
        "mbit": setting.mbit,
        "delay_ms": setting.delay_s * 1e3,
        **summary(told),
        "virtual_clock": summary(serve(setting)),
        "floor": floor(setting),
        "provenance": provenance(seed=setting.seed),
    }


def _run_job(text: str) -> None:
    job = json.loads(text)
    setting, peers = Setting(**job["setting"]), tuple(job["peers"])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if job["stage"] is not None:
            runner.run(run_stage(job["stage"], setting, job["host"], peers))
        else:
            served = runner.run(run_client(setting, job["host"], peers))
            print(json.dumps([asdict(each) for each in served]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.wan_real", description="MoLink's setting on real networks; as root."
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=100.0, help="of arrivals (100)")
    parser.add_argument("--out", type=Path, help="add the rows to this JSON file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        _run_job(arguments.job)
        return
    if (reason := why_not()) is not None:
        raise SystemExit(f"error: {reason}")
    rows: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        rows = {row["policy"]: row for row in json.loads(arguments.out.read_text())["rows"]}
    for policy in arguments.policies:
        rows[policy] = measure(Setting(policy=policy, seconds=arguments.seconds))
        result = {"what": WHAT, "rows": [rows[name] for name in POLICIES if name in rows]}
        print(real_links(result))
        if arguments.out:
            write(arguments.out, result)


WHAT = (
    "real processes, p2p daemons and TCP in network namespaces; the engine is a stand-in that"
    " waits as long as an RTX 4090 would and sends activations of the true size"
)

if __name__ == "__main__":
    main()
