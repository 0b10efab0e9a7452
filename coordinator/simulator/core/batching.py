"""What one step takes of what waits at a peer. Pure."""

from coordinator.simulator.core.parts import SimulatedChunk
from coordinator.simulator.core.profiles import StepLimits


def next_batch(
    queue: list[SimulatedChunk], limits: StepLimits
) -> tuple[list[SimulatedChunk], list[SimulatedChunk], int, int]:
    """A step's pieces within its bounds in order of arrival, the rest, prefills and their tokens.

    What does not fit is passed over for later pieces of other sessions that do. A prefill piece
    that is longer than the budget runs when it is the first.
    """
    taken: list[SimulatedChunk] = []
    rest: list[SimulatedChunk] = []
    prefills = tokens = decodes = context = 0
    passed: set[int] = set()
    decodes_max, context_max = limits.decodes_max, limits.context_tokens_max
    for piece in queue:
        if not piece.prefill:
            in_kv = piece.session.tokens_in_kv
            if decodes < decodes_max and context + in_kv <= context_max:
                taken.append(piece)
                decodes += 1
                context += in_kv
                continue
        elif (
            prefills < limits.prefills_max
            and (prefills == 0 or tokens + piece.tokens <= limits.prefill_tokens_max)
            and piece.session.number not in passed
        ):
            taken.append(piece)
            prefills += 1
            tokens += piece.tokens
            continue
        else:
            passed.add(piece.session.number)
        rest.append(piece)
    return taken, rest, prefills, tokens
