"""What an idle peer of the bundled model costs: processes, memory, and time to serve; and how soon
a command asks.

Starts a founder that keeps the plan alive, then times a peer that returns under an identity which
the plan knows: from its command to each of its events. Memory is the proportional set size (PSS)
of the peer and its children while nothing is asked of it. ``tests/e2e/test_footprint.py`` bounds
what of it is anonymous (no file's) by the recorded figure: how much of their libraries' files is
resident depends on who else has them open, and on how they came into the page cache.

``anabranch ask`` is timed from its command to its request: to the first byte of its answer, less
the time to the first token, which it says at its end.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import report
from testing.local_swarm import LocalPeer, LocalSwarm
from testing.paths import ROOT

MODEL = ROOT / "models" / "brook"
EVENTS = ("listening", "measured", "assigned", "serving")
SHARED_MIB_MAX = 16.0
"""Maximum memory that a lone peer shares with other programs: Python and the system's libraries.
torch alone is more."""


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.speed.footprint", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def memory_apart(model: Path) -> int:
    """What the whole model needs, found in another process: this one must not hold torch, whose
    pages the peers would then share with it."""
    code = (
        f"from testing.reference import memory_for, Path; print(memory_for(Path({str(model)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def wait_idle(peer: LocalPeer, limit_s: float = 60.0) -> None:
    """Wait until the peer has no child but its daemon, for two seconds on end."""
    root = psutil.Process(peer.process.pid)
    until_s = time.monotonic() + limit_s
    quiet_s = time.monotonic()
    while time.monotonic() - quiet_s < 2.0 and time.monotonic() < until_s:
        if len(root.children(recursive=True)) > 1:
            quiet_s = time.monotonic()
        time.sleep(0.1)


def anonymous_bytes(pid: int) -> int:
    """What a process holds that no file does: heaps, stacks, and pages of files that it changed."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "Anonymous":
            return int(size.split()[0]) << 10
    raise LookupError(f"the kernel does not say what process {pid} holds")


def footprint(peer: LocalPeer) -> dict[str, Any]:
    """Processes, and MiB that a peer and its children hold: PSS, what is resident, and what of that
    is in no file."""
    root = psutil.Process(peer.process.pid)
    family = [root, *root.children(recursive=True)]
    return {
        "processes": len(family),
        "pss_mib": sum(process.memory_full_info().pss for process in family) / 2**20,
        "resident_mib": sum(process.memory_info().rss for process in family) / 2**20,
        "anonymous_mib": sum(anonymous_bytes(process.pid) for process in family) / 2**20,
        "by_process": [
            [process.name(), process.memory_full_info().pss / 2**20] for process in family
        ],
    }


def asking(addresses: list[str]) -> dict[str, Any]:
    """Seconds from a command to its request and to its first text, what it holds then (PSS), and
    whether torch is in its memory."""
    command = [sys.executable, "-m", "anabranch", "ask", "--model", str(MODEL)]
    command += ["--prompt", "One morning", "--max-new-tokens", "8", "--initial-peers", *addresses]
    started_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    process.stdout.read(1)
    text_s = time.monotonic() - started_s
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    pss = psutil.Process(process.pid).memory_full_info().pss
    said = process.communicate()[1].decode()
    first = re.search(r"first after ([0-9.]+) s", said)
    assert first is not None, said
    return {
        "request_s": text_s - float(first[1]),
        "text_s": text_s,
        "pss_mib": pss / 2**20,
        "torch": "libtorch" in mapped,
    }


def main() -> int:
    arguments = parse()
    console = Console()
    whole_gib = memory_apart(MODEL) / 2**30
    rounds: list[dict[str, Any]] = []
    alone: dict[str, Any] = {}
    with LocalSwarm(MODEL) as swarm:
        first = swarm.start_peer(memory_gib=1.2 * whole_gib, name="first")
        first.wait_for("serving")
        swarm.start_peer(memory_gib=0.62 * whole_gib, name="returning").wait_for("serving")
        for _ in range(arguments.rounds):
            swarm.peers[-1].stop()
            started_unix_s = time.time()
            peer = swarm.start_peer(memory_gib=0.62 * whole_gib, name="returning")
            peer.wait_for("serving")
            since = {
                name: event["unix_s"] - started_unix_s
                for name in EVENTS
                if (event := peer.find(name)) is not None
            }
            rounds.append({"seconds_to": since})
        asked = [asking(swarm.addresses) for _ in range(1 + arguments.rounds)][1:]  # files are read
        swarm.peers[-1].stop()
        # Alone on the machine, a process shares no pages with its like: the honest figure.
        wait_idle(first)
        alone = footprint(first)
    result = {
        **report.provenance(0),
        "idle_peer": alone,
        "seconds_to_median": {
            name: statistics.median(r["seconds_to"][name] for r in rounds)
            for name in EVENTS
            if all(name in r["seconds_to"] for r in rounds)
        },
        "rounds": rounds,
        "ask": {
            "request_s_median": statistics.median(each["request_s"] for each in asked),
            "rounds": asked,
        },
    }
    console.print(result)
    shared_mib = alone["resident_mib"] - alone["pss_mib"]
    if shared_mib > SHARED_MIB_MAX:
        console.print(f"Another program here shares {shared_mib:.0f} MiB with it: nothing written.")
        return 1
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
