"""Numbers of the search for chains, each with its reason. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How long each part of the search goes on, and how much of what it finds is kept."""

    moves_max: int = 2_000
    """Maximum moves of one improvement without a clock."""
    stale_least: int = 800
    stale_per_peer: int = 60
    """Moves in a row without gain that end an improvement, per peer; ``stale_least`` is the
    minimum."""
    candidates_max: int = 300
    """Maximum chains that are made without a clock."""
    refined: int = 3
    """Number of the best candidates that are improved by moves."""
    patiences: tuple[float, ...] = (0.2, 1.0)
    """Shares of the moves without gain after which a candidate gives way to the next, turn by turn:
    first all are improved for a while, then the best as long as that helps. With a third of the
    time for each instead, plans of 3 s for 12 clusters served 4% less by the estimate, as the
    geometric mean of three seeds."""
    fruitless_max: int = 3
    """Turns in a row without gain after which no more candidates are improved."""
    judged_least: int = 3
    """Minimum chains judged, however late it is."""
    sets_share: float = 0.2
    """Share of the time that is gone when the dynamic program over sets of peers ends."""
    columns_share: float = 0.4
    """Share of the time that is gone when column generation ends and moves by the estimate begin.
    With 0.4 and 0.7, plans of 3 s for 16 clusters served 4% less by the estimate, as the
    geometric mean; with 0.2 and 0.3 as much."""
    rings: int = 3
    """Number of the quickest rings around which other chains are packed, where the speed of one
    answer counts; for each of ``HELD_SHARES``."""
    kicks: int = 2
    """Maximum moves made at once when single moves stop helping."""
    patience: int = 120
    """Moves in a row without gain before up to ``kicks`` are made at once."""
    alone_max: int = 3
    """Maximum single chains yielded per pass."""
    ordered_regions_max: int = 3
    """Maximum regions that are tried in every order; more are tried in one order only."""
    sets_max: int = 24
    """Maximum sets of peers over which chains are looked for."""
    holders: int = 2
    """Minimum peers per stage in the chains that give each layer a second holder."""
    firsts_max: int = 6
    """Maximum peers from which rings begin, the quickest per layer first: a ring may begin at any
    of its peers with room for the embedding."""
    ring_slack: float = 1.5
    """Paths are followed up to this multiple of the quickest ring so far: layers that move to the
    quicker peers may make them the quickest."""
    failed_characters_max: int = 200
    """Maximum length of what is said of a failure."""


SEARCH = SearchConfig()
