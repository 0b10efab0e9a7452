"""What people are told of peers: their states, flags and figures, and the columns that show them.

Pure. Programs get the fields as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dht.messages.types import span_text
from dht.process.json_file import Json

STATES = {"silent": "not answering", "unknown": "not asked yet"}
"""Words for states that are not their own words."""
FLAGS = {"ghost": "not answering", "lying": "announces layers that it does not answer for"}
"""What the page saw a flagged peer do."""
NOTHING = "–"


def told(peer: Json) -> tuple[str, str]:
    """A peer's state, and what else is wrong with it, in words; the second is mostly empty."""
    state = str(STATES.get(peer["state"], peer["state"]))
    wrong = dict.fromkeys(FLAGS[flag] for flag in peer["flags"])
    return state, "; ".join(each for each in wrong if each != state)


def long_duration(seconds: float | None) -> str:
    """``4 min``, ``3 h``, ``12 d``; a dash without a value."""
    if seconds is None:
        return NOTHING
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def milliseconds(seconds: float | None) -> str:
    """``12 ms``, ``0.4 ms``; a dash without a value."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"


def megabits(bytes_per_s: float | None) -> str:
    """``93 Mbit/s``; a dash without a value."""
    if bytes_per_s is None:
        return NOTHING
    value = bytes_per_s * 8 / 1e6
    return f"{value / 1000:.1f} Gbit/s" if value >= 1000 else f"{value:.3g} Mbit/s"


def _layers(peer: Json) -> str:
    if peer["end"] <= peer["start"]:
        return NOTHING
    return span_text(peer["start"], peer["end"]).replace("-", "–")


def _speed(peer: Json) -> str:
    """A whole number, and with a digit more below 1, but for 0."""
    value = peer["tokens_per_s"]
    return f"{value:.1f}" if 0 < value < 1 else f"{value:.0f}"


def _answered(peer: Json) -> str:
    if peer["answered_s"] is None:
        return "never"
    return f"{long_duration(peer['answered_s'])} ago, {milliseconds(peer['rtt_s'])}"


def _links(peer: Json) -> str:
    links = peer["links"]
    if not links:
        return NOTHING
    speed, rtt = megabits(links["bandwidth_bytes_per_s"]), milliseconds(links["rtt_s"])
    return f"{links['count']}: {speed}, {rtt}"


def _up(peer: Json) -> str:
    return NOTHING if peer["state"] in {"silent", "gone"} else long_duration(peer["uptime_s"])


def _record(peer: Json) -> str:
    return "there" if peer["record_there"] else f"gone for {long_duration(peer['last_seen_s'])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the peers' table; the texts are of a peer in ``/api/v1/state``."""

    label: str
    text: Callable[[Json], str]
    note: Callable[[Json], str] = lambda peer: ""
    """What stands below it on the page, in small letters; mostly empty."""
    is_wrong: bool = False
    """Whether the note says what is wrong; that is told on a terminal, too."""
    terminal: str = ""
    """Its format on a terminal, where all together take 80 characters; empty: it is not there."""


COLUMNS = (
    # 19 characters of a name: they tell apart peers of one name (names_in).
    Column(label="Name", text=lambda peer: str(peer["name"]), terminal="<20.19"),
    Column(
        label="State",
        text=lambda peer: told(peer)[0],
        note=lambda peer: told(peer)[1],
        is_wrong=True,
        terminal="<14",
    ),
    Column(label="Layers", text=_layers, note=lambda peer: str(peer["why_idle"]), terminal="<8"),
    Column(label="GPU", text=lambda peer: str(peer["gpu"]), terminal="<23.23"),
    Column(label="tokens/s", text=_speed, terminal=">8"),
    Column(label="Answered", text=_answered),
    Column(label="Links (median)", text=_links),
    Column(label="Way", text=lambda peer: str(peer["via"])),
    Column(label="Up", text=_up, terminal=">7"),
    Column(label="Record", text=_record),
    Column(label="Version", text=lambda peer: str(peer["version"])),
)
"""The peers' table, on the page and on a terminal."""
