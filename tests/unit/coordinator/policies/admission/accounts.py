"""Whether the accounts of a stage's KV room add up, recomputed from what each session holds."""

from coordinator.policies.admission.room import KvRoom


def check_room(room: KvRoom) -> None:
    """Raise AssertionError if the accounts are inconsistent."""
    for what, by_layer in (("held", room._held), ("charged", room._charged)):
        for at, told in enumerate(by_layer):
            over = [each for each in room._holders.values() if at in room._span(each.ask)]
            if told != sum(getattr(each, what) for each in over):
                raise AssertionError(f"{what} of layer {room.start + at} does not add up")
    if max(room._held, default=0) > room.pages:
        raise AssertionError("more is held than there is")
