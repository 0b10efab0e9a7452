"""docs/families.md is about every family, and none is served wrongly."""

from bench.families.every_family import FAILED, SAME, WRONG
from bench.results_table import recorded


def test_logits_of_every_family_are_near_those_of_transformers() -> None:
    families = recorded()["families"]["families"]
    assert len(families) > 20
    assert all(found["max_logit_error_float32"] < 1e-3 for found in families.values())


def test_every_family_is_refused_or_served_as_transformers_runs_it() -> None:
    found = [kind for kind, _ in recorded()["every_family"]["families"].values()]
    assert found.count(SAME) > 50
    assert WRONG not in found
    assert FAILED not in found
