"""The table of large models names what there is."""

from transformers import CONFIG_MAPPING

from bench.families.large_models import LARGE
from bench.results_table import render
from testing.packed_checkpoints import FORMATS


def test_each_has_a_class_and_a_format_and_a_line_in_the_table() -> None:
    for name, model in LARGE.items():
        assert model.family in CONFIG_MAPPING, name
        assert not model.text_type or model.text_type in CONFIG_MAPPING, name
        assert not model.packed or model.packed in FORMATS, name
    found = dict.fromkeys(LARGE, ("same", "")) | {"OLMo 3": ("refused", "a reason")}
    result = {"transformers": "5.23.0", "models": found}
    lines = render("every_family_large", {"every_family_large": result}.__getitem__).splitlines()
    assert lines[0].startswith(f"{len(LARGE) - 1} of {len(LARGE)} are served")
    assert lines[-1] == "| OLMo 3 | olmo3 | 16 bits | refused: a reason |"
    assert len(lines) == 4 + len(LARGE)
