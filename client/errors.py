"""Why the swarm did not answer, for people and for programs."""

from dht.errors import SwarmError


def layers_text(ranges: tuple[tuple[int, int], ...]) -> str:
    """Half-open ranges as people count them: ``layers 3-5 and 7``."""
    parts = [f"{start}" if end - start == 1 else f"{start}-{end - 1}" for start, end in ranges]
    noun = "layer" if len(parts) == 1 and "-" not in parts[0] else "layers"
    return f"{noun} {' and '.join(filter(None, (', '.join(parts[:-1]), parts[-1])))}"


class UnavailableError(SwarmError):
    """Some layers are held by nobody that can be reached now.

    ``missing`` are half-open layer ranges; empty when peers hold all layers but refuse.
    ``retry_after_s`` is when a full swarm expects to have room; 0 where nobody can say.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[tuple[int, int], ...] = (),
        *,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.retry_after_s = retry_after_s
