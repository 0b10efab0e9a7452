"""Chooses the pieces that one step of a peer runs in Helix's simulator. Pure."""

from coordinator.simulator.core.parts import SimulatedPiece
from coordinator.simulator.core.profiles import StepLimits


def next_batch(
    queue: list[SimulatedPiece], limits: StepLimits
) -> tuple[list[SimulatedPiece], list[SimulatedPiece], int, int]:
    """Returns the step's pieces in order of arrival, the rest, the prefills and their tokens.

    A piece that does not fit is skipped for later pieces of other sessions that fit. A prefill
    piece longer than the limit runs if it is the step's first prefill.
    """
    taken: list[SimulatedPiece] = []
    rest: list[SimulatedPiece] = []
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
