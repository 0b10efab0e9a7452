"""What volunteers gave, as far as the page itself saw it: layers held by peers that answered. Pure.

A peer's own word on what it served is left out, for nobody can check it. Only those are named, and
counted by themselves, who asked the page's owner for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from client.pages.clean import clean_name
from dht.errors import UserError
from dht.process.json_file import Json

ALL = ""
"""The key of the sum of all peers; others have the peer's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConfig:
    """What the page's sum counts."""

    days: int = 30
    """Days that it goes back."""
    step_s_max: float = 60.0
    """Between states further apart, as after a pause of the machine, nothing is counted."""


GIVEN = GivenConfig()


def thanked_of(words: list[str]) -> dict[str, str]:
    """Names by peer id, of ``ID=NAME``; raises UserError."""
    found = {}
    for word in words:
        peer_id, equals, name = word.partition("=")
        if not (peer_id.strip() and equals and name.strip()):
            raise UserError(f"--thank is {word!r}; it must be a peer's id and a name: ID=NAME")
        found[peer_id.strip()] = clean_name(name)
    return found


@dataclass(slots=True)
class GivenTally:
    """Layer-seconds between states: of all believed holders, and of each that is named."""

    named: frozenset[str] = frozenset()
    _last_unix_s: float | None = None
    _sums: dict[str, float] = field(default_factory=dict)

    def look(self, state: Json) -> None:
        """Count the time since the last state for what is held in this one."""
        now_unix_s, last_unix_s = state["generated_unix_s"], self._last_unix_s
        self._last_unix_s = now_unix_s
        if last_unix_s is None or not 0 < now_unix_s - last_unix_s <= GIVEN.step_s_max:
            return
        for peer in state["peers"]:
            if not peer["counts"]:
                continue
            layer_s = (peer["end"] - peer["start"]) * (now_unix_s - last_unix_s)
            for key in {ALL, peer["id"]} & {ALL, *self.named}:
                self._sums[key] = self._sums.get(key, 0.0) + layer_s

    def take(self) -> dict[str, float]:
        """The layer-seconds since this was last asked, by key."""
        taken, self._sums = self._sums, {}
        return taken


def given_json(layer_s: Mapping[str, float], thanked: Mapping[str, str]) -> Json:
    """The sum in layer-hours, and that of each who is ``thanked``, by name: it is no contest."""
    named = [
        {"name": name, "layer_hours": layer_s.get(peer_id, 0.0) / 3600}
        for peer_id, name in thanked.items()
    ]
    return {
        "days": GIVEN.days,
        "layer_hours": layer_s.get(ALL, 0.0) / 3600,
        "named": sorted(named, key=lambda each: str(each["name"]).lower()),
    }
