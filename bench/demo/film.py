"""Records the README's film: real peers, a chat in a terminal, one peer killed in mid-answer.

The swarm is that of ``make demo``, and ``anabranch chat`` runs in a pseudo terminal. Every change
stands in the film at the time at which it was seen. Before, the same answer is asked for and nobody
is killed: the film is written only if both texts are the same.
"""

import argparse
import asyncio
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from bench.demo.moving_picture import Line, Screen, styled, svg
from bench.demo.starting import MODEL, PROMPT, ROUND_TRIP_MS, phase_of, volunteers
from client import Swarm
from testing.local_swarm import LocalPeer, LocalSwarm, PeerStartError
from testing.paths import ROOT
from testing.terminal import Terminal, cells

TOKENS = 120
COLUMNS, ROWS = 76, 20
LOOK_S, FRAME_S, KEY_S = 0.1, 0.05, 0.08
"""Between two looks at the peers; between two pictures, at least; between two keys."""
BEFORE_S, AFTER_S = 1.0, 4.0
"""What is shown before the first key, and behind the last change."""
STYLE_OF = {"serves": "32", "killed": "31"}
"""The colours of what a peer does, by its first word; others are yellow."""


@dataclass(slots=True)
class Watched:
    """What the peers did, as it was seen."""

    peers: Sequence[LocalPeer]
    seen: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """Times by the monotonic clock, and what each peer did from then on."""

    def look(self) -> None:
        """Note what each does now, if that is news."""
        now = tuple(
            "killed" if peer.process.poll() is not None else phase_of(peer.read_events())
            for peer in self.peers
        )
        if not self.seen or self.seen[-1][1] != now:
            self.seen.append((time.monotonic(), now))

    def until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Look until it is ``done``; raises PeerStartError where it is not within ``limit_s``."""
        until_s = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > until_s:
                raise PeerStartError(f"nothing to film within {limit_s:.0f} s")
            self.look()
            time.sleep(LOOK_S)


def picture(
    names: Sequence[str], doing: Sequence[str], second: int, written: str, round_trip_ms: float
) -> tuple[Line, ...]:
    """One screen: who holds what, and below it the end of what the terminal shows."""
    links = f", {round_trip_ms:g} ms between them" if round_trip_ms else ""
    top = f"{len(names)} volunteers; none can hold the model alone{links}"
    lines = [styled(f"{top}{second:>{COLUMNS - len(top) - 2}} s", "2"), ()]
    for name, does in zip(names, doing, strict=True):
        style = STYLE_OF.get(does.partition(" ")[0], "33")
        mark = "✝" if does == "killed" else "●"
        lines.append((*styled(f"{mark} ", style), *styled(f"{name}  "), *styled(does, style)))
    lines += [styled("─" * COLUMNS, "2"), styled("$ anabranch chat anabranch:…", "2")]
    terminal = cells(written)
    while terminal and not "".join(text for text, _ in terminal[-1]).strip():
        terminal.pop()
    room = ROWS - len(lines)
    return (*lines, *map(tuple, terminal[-room:]))


def screens(
    names: Sequence[str],
    watched: Sequence[tuple[float, tuple[str, ...]]],
    history: Sequence[tuple[float, str]],
    start_s: float,
    round_trip_ms: float,
) -> list[Screen]:
    """The film: a screen for each time from ``start_s`` on at which something changed."""
    end_s = max(history[-1][0], watched[-1][0])
    times = sorted(
        {round((at_s - start_s) / FRAME_S) for at_s, _ in (*watched, *history) if at_s > start_s}
        | {round(second / FRAME_S) for second in range(int(end_s - start_s) + 1)}
    )
    found: list[Screen] = []
    for frame in times:
        film_s = frame * FRAME_S
        until_s = start_s + film_s + FRAME_S / 2
        _, doing = watched[bisect_right(watched, until_s, key=lambda each: each[0]) - 1]
        _, written = history[bisect_right(history, until_s, key=lambda each: each[0]) - 1]
        lines = picture(names, doing, int(film_s), written, round_trip_ms)
        if not found or found[-1].lines != lines:
            found.append(Screen(at_s=film_s, lines=lines))
    return found


async def undisturbed(swarm: LocalSwarm, prompt: str, tokens: int) -> str:
    """The answer while nobody is killed."""
    async with Swarm.connect(swarm.addresses, model=str(MODEL)) as client:
        return (await client.generate(prompt, max_new_tokens=tokens, temperature=0.0)).text


def filmed(swarm: LocalSwarm, arguments: argparse.Namespace) -> list[Screen]:
    """Chat, kill a stage in mid-answer, and return what was to be seen.

    Raises PeerStartError where nobody missed it, or the answer is not the undisturbed one.
    """
    expected = asyncio.run(undisturbed(swarm, arguments.prompt, arguments.max_new_tokens))
    invitation = str(swarm.peers[0].wait_for("invitation")["text"])
    command = [sys.executable, "-m", "anabranch", "chat", invitation, "--no-history"]
    command += ["--max-new-tokens", str(arguments.max_new_tokens), "--temperature", "0"]
    variables = {
        name: value for name, value in os.environ.items() if name not in {"TERM", "NO_COLOR"}
    }
    watched = Watched(swarm.peers)
    with Terminal(
        command, environment=variables, directory=ROOT, columns=COLUMNS, lines=ROWS
    ) as chat:
        chat.wait_for(r"Ctrl-C\s+stops\s+an\s+answer\.")
        watched.look()
        start_s = time.monotonic()
        watched.until(lambda: time.monotonic() > start_s + BEFORE_S, 2 * BEFORE_S)
        before = len(chat.text)
        for key in f"{arguments.prompt}\n":
            chat.type(key)
            time.sleep(KEY_S)
        half = before + len(arguments.prompt) + len(expected) // 2
        watched.until(lambda: len(chat.text) >= half, 60.0)
        asked = re.findall(r"asking ([^…]+)…", chat.history()[-1][1])
        *_, victim = asked[-1].split(", ")  # the last stage of its route
        next(peer for peer in swarm.peers if peer.name == victim).kill()
        watched.until(lambda: "tokens after a prompt of" in chat.text, 120.0)
        watched.until(lambda: chat.text.rstrip().endswith(">"), 10.0)
        history, text = chat.history(), " ".join(chat.text.split())
        chat.type("\x04")
    if not any(f"{victim} left; rerouting" in written for _, written in history):
        raise PeerStartError(f"nobody missed {victim}: {text}")
    if " ".join(expected.split()) not in text:
        raise PeerStartError(f"the answer is another one: {text}\ninstead of {expected}")
    names = [peer.name for peer in swarm.peers]
    return screens(names, watched.seen, history, start_s, arguments.round_trip)


def main() -> int:
    """Record the film and say where it is."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo.film",
        description="Record a chat in whose midst a peer is killed, as a moving SVG.",
        epilog="example: python -m bench.demo.film --out docs/images/film.svg",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/images/film.svg"), help="(docs/images/film.svg)")
    add("--prompt", default=PROMPT, help=f"text to continue ({PROMPT})")
    add("--max-new-tokens", type=int, default=TOKENS, metavar="N", help=f"of the answer ({TOKENS})")
    add("--round-trip", type=float, default=ROUND_TRIP_MS, metavar="MS", help="of each link (20)")
    arguments = parser.parse_args()
    console = Console()
    try:
        with volunteers(console, MODEL, arguments.round_trip) as swarm:
            found = filmed(swarm, arguments)
    except (PeerStartError, AssertionError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    drawn = svg(
        found,
        columns=COLUMNS,
        rows=ROWS,
        hold_s=AFTER_S,
        title="A volunteer is killed in mid-answer, and the answer goes on",
        about="Recorded in real time: a chat in a terminal, and above it what three volunteers do.",
    )
    arguments.out.write_text(drawn)
    kib = arguments.out.stat().st_size / 1024
    print(f"{arguments.out}: {kib:.0f} KiB, {found[-1].at_s:.1f} s, {len(found)} screens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
