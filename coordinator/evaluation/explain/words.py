"""A placement's weak points in sentences. Pure."""

from collections.abc import Callable, Sequence

from coordinator.evaluation.explain.weak_points import Loss, WeakPoints
from dht.messages.types import layers_text

NAMED_MAX = 3
"""Peers or links named in a sentence."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Naming = Callable[[str], str]
"""A peer's name for people, by its id: names that strangers chose are cleaned there."""


def sentences(found: WeakPoints, name: Naming) -> tuple[str, ...]:
    """What answers wait for, what one more peer brings, and which losses hurt; worst first."""
    if found.missing:
        verb = "has" if _is_one(found.missing) else "have"
        return (f"{_layers(found.missing)} {verb} no holder: there are no answers.",)
    said = [waits_for(found, name)]
    said += [lost(loss, name) for loss in found.losses]
    shown = sum(loss.share >= 1 for loss in found.losses)
    if more := found.needed - shown:
        peers = f"{number(more)} more peer{'s' * (more > 1)}"
        said.append(f"The same holds for {peers}.")
    if len(found.fewest) > 1:
        count = number(len(found.fewest))
        said.append(f"Answers stop if {count} peers leave at once: {named(found.fewest, name)}.")
    return tuple(said)


def waits_for(found: WeakPoints, name: Naming) -> str:
    """What limits all answers together, and what one more peer there brings."""
    flow = found.tokens_per_s
    rate = f"{flow:,.0f} tokens/s" if flow >= 100 else f"{flow:.3g} tokens/s"
    if found.links:
        most = named([_edge(each.kind, each.peers, name) for each in found.links], str)
        return f"Answers wait for connections, which carry {rate} together: {most}."
    where = layers_text(*found.narrowest)
    if found.narrowest == ((0, found.layers),) and not found.holders:
        return (
            f"All layers are equally narrow, {rate}: one more peer helps once all is planned anew."
        )
    if not found.holders:
        return f"Answers wait for {where}, each of which carries {rate}."
    count = len(found.holders)
    hold = f"{number(count)} peer{' holds' if count == 1 else 's hold'} {_them(found)}"
    text = f"Answers wait for {where}: {hold} ({named(found.holders, name)}), {rate}"
    text += " together" if count > 1 else ""
    if found.slowed:
        verb = "limits" if len(found.slowed) == 1 else "limit"
        noun = "connection" if len(found.slowed) == 1 else "connections"
        text += f"; the {noun} of {named(found.slowed, name)} {verb} that"
    if found.gain is None:
        return f"{text}."
    return (
        f"{text}; one more peer like {name(found.gain.like)} there gives {found.gain.share:+.0%}."
    )


def lost(loss: Loss, name: Naming) -> str:
    """What the loss of a peer costs."""
    who = name(loss.peer_id)
    if loss.layers:
        verb = "has" if _is_one(loss.layers) else "have"
        return f"Without {who}, {layers_text(*loss.layers)} {verb} no holder, and answers stop."
    if loss.share >= 1:
        return f"Without {who}, no route is left, and answers stop."
    return f"Without {who}, {loss.share:.0%} less gets through."


def number(count: int) -> str:
    """A count in a sentence."""
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def named(items: Sequence[str], name: Naming) -> str:
    """The first ``NAMED_MAX`` names, and how many more there are."""
    shown = [name(each) for each in items[:NAMED_MAX]]
    if more := len(items) - len(shown):
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _edge(kind: str, peers: Sequence[str], name: Naming) -> str:
    names = [name(each) for each in peers]
    if kind == "link":
        return " to ".join(names) if len(names) > 1 else f"clients to {''.join(names) or 'peers'}"
    return names[0] if kind == "peer" else f"the {kind} of {', '.join(names[:NAMED_MAX])}"


def _layers(ranges: Sequence[tuple[int, int]]) -> str:
    return layers_text(*ranges).capitalize()


def _is_one(ranges: Sequence[tuple[int, int]]) -> bool:
    return len(ranges) == 1 and ranges[0][1] - ranges[0][0] == 1


def _them(found: WeakPoints) -> str:
    return "it" if _is_one(found.narrowest) else "them"
