"""Which of a model's modules are its layers, and models whose layers keep nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from bench.families.every_family import small_config, write_random
from dht.errors import UserError
from node.model.inspection.meta_model import layers_name
from node.model.layer_range import ModelLayout
from node.weights.store import WeightStore

LONGCAT: dict[str, Any] = {
    "num_layers": 2,
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 32,
}
CONFIG: Any = SimpleNamespace(num_hidden_layers=2)
CONFIG.get_text_config = lambda: CONFIG


class Named(nn.Module):
    """Two stacks as long as each other, and what it calls its decoder."""

    def __init__(self, decoder: str) -> None:
        super().__init__()
        for name in ("seeing", "writing"):
            stack = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.add_module(name, nn.ModuleDict({"layers": stack}))
        self.decoder = nn.Linear(2, 2)
        self._decoder = decoder

    def get_decoder(self) -> nn.Module:
        return self.get_submodule(self._decoder)


def test_only_the_decoder_counts() -> None:
    assert layers_name(Named("writing"), CONFIG) == "writing.layers"


def test_a_head_that_is_called_the_decoder_hides_no_layers() -> None:
    model = Named("decoder")
    del model.seeing
    assert layers_name(model, CONFIG) == "writing.layers"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("openai-gpt", "its layers keep neither keys and values nor a state"),
        ("jetmoe", "its layers look at numbers before they keep any"),  # it does keep some
        ("longcat_flash", "it has 0 stacks of 4 layers"),  # each of its 2 is counted twice
    ],
)
def test_what_cannot_be_told_of_its_layers_is_the_reason(
    family: str, reason: str, tmp_path: Path
) -> None:
    write_random(small_config(family, LONGCAT if family == "longcat_flash" else None), tmp_path)
    with pytest.raises(UserError, match=reason):
        ModelLayout.of(WeightStore.open(str(tmp_path)), "float32")
