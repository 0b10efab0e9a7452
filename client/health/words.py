"""What people are told of a peer's state and flags; programs get the fields as they are. Pure."""

from dht.process.json_file import Json

STATES = {"silent": "not answering", "unknown": "not asked yet"}
"""Words for states that are not their own words."""
FLAGS = {"ghost": "not answering", "lying": "announces layers that it does not answer for"}
"""What the page saw a flagged peer do."""


def told(peer: Json) -> tuple[str, str]:
    """A peer's state, and what else is wrong with it, in words; the second is mostly empty."""
    state = str(STATES.get(peer["state"], peer["state"]))
    wrong = dict.fromkeys(FLAGS[flag] for flag in peer["flags"])
    return state, "; ".join(each for each in wrong if each != state)
