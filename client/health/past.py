"""What the page keeps of the time behind it: the spans of its charts, and what was lost. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from client.health.given import GIVEN
from client.pages.clean import clean_name
from dht.process.json_file import Json

INCIDENTS_SHOWN_MAX = 20
LOST = "lost"
SWARM = ""
"""The key of incidents of the swarm as a whole; others have the peer's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A length of time up to now in equal steps, which begin at multiples of their length."""

    name: str
    step_s: int
    steps: int

    @property
    def span_s(self) -> int:
        return self.step_s * self.steps

    def begin_unix_s(self, now_unix_s: float) -> int:
        """The beginning of the first step; the last one holds ``now_unix_s``."""
        return (int(now_unix_s) // self.step_s + 1 - self.steps) * self.step_s


HOUR = Span(name="1 h", step_s=60, steps=60)
DAY = Span(name="24 h", step_s=900, steps=96)
WEEK = Span(name="7 days", step_s=3600, steps=168)
SPANS = (HOUR, DAY, WEEK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A span's steps in which something came, oldest first."""

    span: Span
    probes: Sequence[Mapping[str, Any]] = ()
    """``start_unix_s``, ``requests``, ``answered``, ``tokens`` of the page's own, ``ttft_p50_s``,
    ``ttft_p95_s`` (None where none was answered)."""
    served: Sequence[Mapping[str, Any]] = ()
    """``start_unix_s``, ``answers``, ``tokens`` of the whole swarm."""


def past_json(past: Past) -> Json:
    """The span and its steps."""
    return {
        "name": past.span.name,
        "span_s": past.span.span_s,
        "step_s": past.span.step_s,
        "probes": [dict(each) for each in past.probes],
        "served": [dict(each) for each in past.served],
    }


def span_from_json(past: Json) -> Span:
    return Span(name=past["name"], step_s=past["step_s"], steps=past["span_s"] // past["step_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that was lost, and when it was back. Times are those at which the page saw it."""

    key: str
    name: str
    what: str
    since_unix_s: float
    until_unix_s: float | None = None
    """None: it is not back."""


def incident_json(incident: Incident) -> Json:
    """The incident; ``what`` says the page in its own words."""
    return {
        "name": clean_name(incident.name),
        "what": incident.what,
        "since_unix_s": incident.since_unix_s,
        "until_unix_s": incident.until_unix_s,
    }


@dataclass(slots=True)
class IncidentWatch:
    """Finds what begins and what ends between two states of the page.

    A peer is lost when it falls silent after it was believed to hold layers: nobody fills the list
    with peers that never served. One that says that it leaves is not lost.
    Nothing begins with the first state after a pause of this machine: nobody was pinged meanwhile.
    """

    open: dict[str, Incident] = field(default_factory=dict)
    _served: set[str] = field(default_factory=set)
    _last_unix_s: float = math.inf

    def look(self, state: Json) -> list[Incident]:
        """Incidents that began or ended with this state."""
        now_unix_s, swarm = state["generated_unix_s"], state["swarm"]
        states = {peer["id"]: peer for peer in state["peers"]}
        began = {
            key: (states[key]["name"], LOST)
            for key in self._served & states.keys()
            if states[key]["state"] == "silent"
        }
        if swarm["verdict"] == "not healthy":
            began[SWARM] = ("the swarm", f"not healthy: {'; '.join(swarm['reasons'])}")
        if now_unix_s - self._last_unix_s > GIVEN.step_s_max:
            began.clear()
        self._last_unix_s = now_unix_s
        back = {key for key, peer in states.items() if peer["counts"]}
        if swarm["healthy"]:
            back.add(SWARM)
        changed = [
            replace(incident, until_unix_s=now_unix_s)
            for key, incident in self.open.items()
            if key in back
        ]
        changed += [
            Incident(key=key, name=name, what=what, since_unix_s=now_unix_s)
            for key, (name, what) in began.items()
            if key not in self.open
        ]
        for incident in changed:
            if incident.until_unix_s is None:
                self.open[incident.key] = incident
            else:
                del self.open[incident.key]
        self._served = (self._served & states.keys()) | (back - {SWARM})
        return changed
