"""Builds a model's code from its configuration on the meta device: shapes without memory."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dht.checkpoints.model_files import library_config
from node.model.inspection.layer_traits import FAILURES
from node.model.inspection.session_inspection import Unservable
from node.weights.store import WeightStore

logger = logging.getLogger(__name__)

LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers in configurations."""


def check_layers(store: WeightStore) -> None:
    """Raise Unservable for a configuration with more layers than the files can hold.

    On the meta device, too, a layer takes time and memory to build.
    """
    named = store.config.get("text_config")
    for config in (store.config, named if isinstance(named, dict) else {}):
        for key in LAYERS_KEYS:
            layers = config.get(key) or 0
            if type(layers) is not int:
                raise Unservable(f"{key} in its config.json is {layers!r:.40}, no whole number")
            if not 0 <= layers <= store.layers_max:
                raise Unservable(
                    f"its configuration says {key} {str(layers)[:40]}, and its files name"
                    f" {store.layers_max} layers at most"
                )


def check_factors(config: Any) -> None:
    """Raise Unservable for factors of longrope that do not fit the heads.

    transformers only warns, and looks at the long ones when a context is long for the first time.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = getattr(config, "rope_parameters", None) or {}
    for kind, rope in (said if "rope_type" not in said else {None: said}).items():
        if not isinstance(rope, Mapping) or rope.get("rope_type") != "longrope":
            continue
        beyond = int(rope["original_max_position_embeddings"]) + 1
        for name, tokens in (("short_factor", 1), ("long_factor", beyond)):
            try:
                ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=tokens, layer_type=kind)
                fits = all(type(each) in (int, float) and each > 0 for each in rope[name])
            except FAILURES:
                fits = False
            if not fits:
                raise Unservable(
                    f"{name} in its config.json is not one number above 0 for each pair of channels"
                    " that its heads rotate"
                )


def check_window(config: Any) -> None:
    """Raise Unservable for a window of no token, which transformers' cache cannot hold either."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    if type(window) is int and window < 1 and "sliding_attention" in kinds:
        raise Unservable(f"sliding_window in its config.json is {window}, no number of tokens")


def auto_class(config: Any) -> Any:
    """The Auto class of ``transformers`` that has a model with a language model's head for
    ``config``: that for text or, for one that also sees or hears, that for several senses.

    A class for text whose own configuration has no model is only a part of the other: no checkpoint
    is of it alone, and none has its names.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    causal, several = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    kind = type(config)
    if kind in causal and (kind not in several or causal[kind].config_class in causal):
        return AutoModelForCausalLM
    return AutoModelForMultimodalLM


def build_meta_model(
    store: WeightStore, dtype: torch.dtype, attention: str | None
) -> tuple[Any, nn.Module]:
    """The configuration and model; ``attention`` None means the model's own implementation.

    Raises whatever the model's code raises, and Unservable.
    """
    check_layers(store)
    config = library_config(store.directory)
    check_factors(config.get_text_config())
    check_window(config.get_text_config())
    return config, model_of(config, dtype, attention)


def model_of(config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """The model of a configuration, which is changed to say nothing of packed weights."""
    from accelerate.big_modeling import init_empty_weights
    from transformers.initialization import no_init_weights

    for said in (config, config.get_text_config()):
        said.return_dict = True  # as generate() asks for, whatever the file says
        if hasattr(said, "quantization_config"):  # how files are packed, no part of the code
            del said.quantization_config
    chosen = {} if attention is None else {"attn_implementation": attention}
    with init_empty_weights(), no_init_weights(), without_missing_libraries():
        model: nn.Module = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=False, **chosen
        )
    return model.eval()


@contextmanager
def without_missing_libraries() -> Iterator[None]:
    """Within the context, a part of a model whose library is not installed is built as an empty
    module, such as Gemma 3n's eye, for which transformers needs timm. What sees or hears does not
    run for token ids; a part that does is missed when the model is inspected."""
    from transformers import AutoModel

    own, build = vars(AutoModel)["from_config"], AutoModel.from_config

    def built(config: Any, **named: Any) -> nn.Module:
        try:
            part: nn.Module = build(config, **named)
        except ImportError as error:
            logger.info("%s is left out: %s", type(config).__name__, " ".join(str(error).split()))
            part = nn.Module()
        return part

    AutoModel.from_config = staticmethod(built)
    try:
        yield
    finally:
        AutoModel.from_config = own


def layers_name(model: nn.Module, config: Any) -> str:
    """Name of the only module list with as many modules as layers; Unservable otherwise.

    In a model that also sees or hears, only its decoder counts.
    """
    count = config.get_text_config().num_hidden_layers
    structure: Any = model
    found = {
        id(module): name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and name
    }
    within: list[str] = [found[id(m)] for m in structure.get_decoder().modules() if id(m) in found]
    stacks = within or list(found.values())  # some models call their LM head the decoder
    stacks = [name for name in stacks if not any(name.startswith(f"{o}.") for o in stacks)]
    if len(stacks) != 1:
        raise Unservable(f"it has {len(stacks)} stacks of {count} layers")
    return stacks[0]


def kept_float32(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Parameters that ``transformers`` loads in float32: declared or built so."""
    structure: Any = model
    patterns = [re.compile(p.replace("*", ".*")) for p in structure._get_dtype_plan(dtype)]
    return frozenset(
        name
        for name, tensor in model.state_dict().items()
        if tensor.dtype is torch.float32 or any(pattern.search(name) for pattern in patterns)
    )
