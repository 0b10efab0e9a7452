"""Every causal language model of ``transformers``, made small.

Nobody can name them all, and new ones come with every release. So each class that
``AutoModelForCausalLM`` knows is made small by its own configuration, filled with random weights,
and asked, in two stages, for eight greedy tokens behind a prompt in two chunks. What matters is the
last column: a model is served as ``transformers`` runs it, or refused by name, never served
wrongly. A class that cannot be made small this way is said to be unknown. Each runs in a process of
its own.

``--joined``: contexts are of 4,096 tokens, and a family is served only if two ``node.join`` measure
and load it and answer for it together, too (:mod:`bench.families.joined`). ``--out`` is written
after each family, and what stands there already, by the same code, is not run again, so that the
whole can be run in pieces (``--only``, or stopped).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.families import joined
from bench.report import earlier, parser_of, provenance, write
from testing import forked
from testing.local_swarm import PeerStartError

if TYPE_CHECKING:
    from node.engine.engine import Engine

SEED = 0
LAYERS, NEW_TOKENS, LIMIT_S = 4, 8, 300
CONTEXT_JOINED, ASK_LIMIT_S = 4096, 600
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_target_positions")
PROMPT = (3, 17, 25, 9, 44, 100, 7, 61, 5, 30) * 4
FIRST_CHUNK = 13
SPREAD = 0.08
"""Standard deviation of the random weights."""
MEMORY_BYTES = 1 << 30
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(CONTEXT_NAMES, 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2,
    "kv_channels": 16,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_k", "num_experts_per_token"), 2),
    "num_kv_shared_layers": 2,
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 24,
    "attention_chunk_size": 32,
    "is_decoder": True,
}
"""What a text configuration is given where it has such a name."""
INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "emu3": {"vocabulary_map": {"<image>": 126, "<|extra_200|>": 127}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "qwen4_exp": INDEXED,
    "qwen4_exp_text": INDEXED,
    "reformer": {
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"] * (LAYERS // 2),
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "feed_forward_size": 96,
        "num_buckets": 4,
        "hash_seed": SEED,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "chunk_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What some families must be told beside :data:`SMALL`, whose numbers do not fit them: sizes that
go together, kinds of layers, configurations inside the configuration."""
SENSES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "base_channels": 32,
    "image_size": 56,
    "patch_size": 14,
    "mlp_ratio": 2,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
"""What the configuration of a part that sees or hears is given."""
EQUALS = (("num_key_value_heads", "num_attention_heads"), ("head_dim", "qk_rope_head_dim"))
SAME, REFUSED, WRONG, UNKNOWN, FAILED = "same", "refused", "wrong", "unknown", "failed"


def small_config(name: str, shape: dict[str, Any] | None = None, text_type: str = "") -> Any:
    """The configuration of ``name``, with few and narrow layers of each of its kinds.

    A model that also sees or hears keeps the parts that do. ``shape`` goes before :data:`SMALL`;
    ``text_type`` is the language model's class where it is not the default.
    """
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[name]()
    text = whole.get_text_config()
    small = small_text(CONFIG_MAPPING[text_type]() if text_type else text, shape)
    if text is whole:
        return small
    rope = getattr(small, "rope_parameters", None) or {}
    if "rope_type" in rope:  # pairs of dimensions for time, height and width
        width = SMALL["head_dim"] * rope.get("partial_rotary_factor", 1.0)
        rope["mrope_section"] = [int(width) // 2 - 2 * (int(width) // 6)] + 2 * [int(width) // 6]
    parts: dict[str, Any] = {}
    for key in whole.sub_configs:
        part = getattr(whole, key)
        if type(part) is type(text):
            parts[key] = small
        elif part is not None:
            parts[key] = type(part)(**_narrowed(part, SENSES))
    tokens = [key for key in whole.to_dict() if key.endswith(("_token_id", "_token_index"))]
    marks = {key: SMALL["vocab_size"] - 1 - at for at, key in enumerate(tokens)}
    beside = whole.to_dict().keys() - text.to_dict().keys()
    told = {key: value for key, value in (shape or {}).items() if key in beside}
    return type(whole)(**marks, **parts, **told)


def _narrowed(config: Any, table: dict[str, Any]) -> dict[str, Any]:
    """What ``table`` says of the numbers that a configuration has, each in its own type."""
    known, aliases = config.to_dict(), getattr(config, "attribute_map", {})
    given = {
        key: value
        for key, value in table.items()
        if key not in aliases and (key in known or key in aliases.values())
    }
    for key, value in given.items():
        was = known.get(key)
        if isinstance(was, float):
            given[key] = float(value)
        elif isinstance(was, list | tuple) and not isinstance(value, list):
            by_layer = len(was) == known.get("num_hidden_layers")
            given[key] = type(was)([value] * (given["num_hidden_layers"] if by_layer else len(was)))
    return given


def small_text(text: Any, shape: dict[str, Any] | None = None) -> Any:
    """A text configuration of the same type, with few and narrow layers."""
    known = text.to_dict()
    given = _narrowed(text, {**SMALL, **(shape or {})})
    for one, other in EQUALS:  # what is the same in the full size stays the same
        if one in given and other in given and known.get(one) == known.get(other):
            given[one] = given[other]
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if kinds and "layer_types" not in (shape or {}):
        given["layer_types"] = [kinds[at % len(kinds)] for at in range(LAYERS)]
    return type(text)(**given)


def made(name: str, directory: Path) -> list[int]:
    """Write the model; returns what ``transformers`` answers, without a cache. Parts that see or
    hear are left out where they need a library that is not here."""
    from node.model.inspection.meta_model import without_missing_libraries

    with without_missing_libraries():
        write_random(small_config(name, OWN.get(name)), directory)
        return greedy(directory)


def write_random(config: Any, directory: Path) -> None:
    """Write a model with random weights."""
    import torch

    from node.model.inspection.meta_model import auto_class

    torch.manual_seed(SEED)
    family = auto_class(config)
    model: Any = family.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
    model.save_pretrained(directory)


def greedy(directory: Path) -> list[int]:
    """What ``transformers`` answers, without a cache."""
    import torch

    from dht.checkpoints.model_files import library_config
    from node.model.inspection.meta_model import auto_class

    family = auto_class(library_config(directory))
    model: Any = family.from_pretrained(directory, dtype=torch.float32).eval()
    seen = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            chosen = model(input_ids=seen, use_cache=False).logits[0, -1].argmax()
            seen = torch.cat([seen, chosen[None, None]], dim=1)
    return [int(token) for token in seen[0, len(PROMPT) :]]


def stages_of(directory: Path) -> list["Engine"]:
    """Engines that hold half of the layers each, or one for a single layer. Raises UserError where
    the model is refused."""
    from node.engine.engine import Engine, EngineConfig
    from node.weights.store import WeightStore

    store = WeightStore.open(str(directory))
    config = EngineConfig(store=store, name="small", memory_bytes=MEMORY_BYTES)
    first = Engine(config)
    layers = first.spec.layers
    if layers == 1:
        first.load(0, layers)
        return [first]
    first.load(0, layers // 2)
    last = Engine(config)
    last.load(layers // 2, layers)
    return [first, last]


def answered(directory: Path) -> list[int]:
    """What the engines answer. Raises UserError where the model is refused."""
    return answer_of(stages_of(directory))


def answer_of(stages: Sequence["Engine"]) -> list[int]:
    """What engines that hold all layers together answer."""
    from dht.messages.session import Sampling
    from node.engine.work_item import WorkItem

    for engine in stages:
        refused = engine.kv.reserve("a", len(PROMPT) + NEW_TOKENS)
        assert refused is None, refused
    out: list[int] = []

    def run(position: int, token_ids: tuple[int, ...], *, drawn: bool) -> None:
        hidden = None
        for engine in stages:
            start, end = engine.held
            item = WorkItem(
                session="a", start=start, end=end, position=position,
                token_ids=token_ids if start == 0 else None, hidden=hidden,
                sampling=Sampling() if drawn and engine is stages[-1] else None,
            )  # fmt: skip
            [result] = engine.step([item])
            assert result.error is None, result.error
            hidden = result.hidden
        if drawn:
            assert result.token_id is not None
            out.append(result.token_id)

    run(0, PROMPT[:FIRST_CHUNK], drawn=False)
    run(FIRST_CHUNK, PROMPT[FIRST_CHUNK:], drawn=True)
    for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS - 1):
        run(position, (out[-1],), drawn=True)
    return out


def outcome(name: str) -> tuple[str, str]:
    """What came of a family, and why."""
    return outcome_of(lambda directory: (directory, made(name, directory)))


def outcome_of(make: Callable[[Path], tuple[Path, list[int]]]) -> tuple[str, str]:
    """What came of a model, and why; ``make`` writes it into a directory and returns its files and
    what ``transformers`` answers."""
    with tempfile.TemporaryDirectory() as directory:
        return outcome_in(Path(directory), make)[:2]


def outcome_in(
    directory: Path, make: Callable[[Path], tuple[Path, list[int]]]
) -> tuple[str, str, int]:
    """What came of a model that is written into ``directory``, why, and how many layers it has."""
    import torch

    from dht.errors import UserError

    torch.set_num_threads(1)
    try:
        files, expected = make(directory)
    except Exception as error:  # noqa: BLE001 - whatever its code says to such a configuration
        return UNKNOWN, line_of(error), 0
    try:
        stages = stages_of(files)
        given = answer_of(stages)
    except UserError as error:
        return REFUSED, str(error).rpartition("cannot be served yet: ")[2], 0
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return FAILED, line_of(error), 0
    if given != expected:
        return WRONG, f"{given} instead of {expected}", 0
    return SAME, "", stages[0].spec.layers


def line_of(error: BaseException) -> str:
    """An error in one line, the first of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def apart(name: str) -> tuple[str, str]:
    """:func:`outcome` in a process of its own."""
    found, why = _told(LIMIT_S, "--one", name)
    return found, why


def joined_apart(name: str) -> tuple[str, str]:
    """What came of a family with contexts of 4,096 tokens, also through two ``node.join``, and why;
    each in a process of its own."""
    with tempfile.TemporaryDirectory() as made_in:
        directory = Path(made_in)
        found, why, *layers = _told(LIMIT_S, "--one", name, "--into", made_in)
        if found != SAME:
            return found, why
        try:
            with joined.swarm_of(directory, *layers) as swarm:
                found, why = _told(ASK_LIMIT_S, "--ask", made_in, *swarm.addresses, late=FAILED)
        except PeerStartError as error:
            return FAILED, f"node.join: {' '.join(str(error).split())[-300:]}"
        return found, why


def _told(limit_s: float, *arguments: str, late: str = UNKNOWN) -> list[Any]:
    """What this command prints in a process of its own, or ``late`` if that takes longer."""
    try:
        done = forked.run("bench.families.every_family", *arguments, limit_s=limit_s)
    except subprocess.TimeoutExpired:
        return [late, f"took more than {limit_s} s"]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return [FAILED, f"its process ended with {done.returncode}: {last[:200]}"]
    told: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _one(arguments: argparse.Namespace) -> list[Any]:
    """What a process of its own tells of one family."""
    if arguments.into is None:
        return list(outcome(arguments.one))
    SMALL.update(dict.fromkeys(CONTEXT_NAMES, CONTEXT_JOINED))
    return list(outcome_in(arguments.into, lambda files: (files, made(arguments.one, files))))


def _ask(directory: Path, addresses: Sequence[str]) -> list[Any]:
    """What a process of its own tells of joined peers."""
    import torch

    torch.set_num_threads(1)
    try:
        asked = asyncio.run(joined.ask(directory, addresses))
        wrong = joined.strayed(directory, asked.answers)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return [FAILED, line_of(error)]
    kept = f"{asked.cached_tokens} tokens of prompts kept, {asked.drafted_tokens} drafted"
    return [WRONG, wrong] if wrong else [SAME, kept]


def main() -> int:
    """Go through all of them, print, and write the result."""
    parser = parser_of("bench.families.every_family", __doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument(
        "--text", action="store_true", help="classes for causal language models alone"
    )
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs="+", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument(
        "--joined", action="store_true", help="with contexts of 4,096, and by two node.join, too"
    )
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="families beside each other (1)"
    )
    parser.add_argument("--large", action="store_true", help="large models by name, as published")
    arguments = parser.parse_args()
    if arguments.large:
        return _large(arguments)
    if arguments.one:
        print(json.dumps(_one(arguments)))
        return 0
    if arguments.ask:
        print(json.dumps(_ask(Path(arguments.ask[0]), arguments.ask[1:])))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # no profile of an earlier run is remembered
        return _all(arguments)


def _all(arguments: argparse.Namespace) -> int:
    """Go through all families."""
    from transformers.models.auto import modeling_auto

    known = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    if not arguments.text:
        known |= {*modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    families: dict[str, tuple[str, str]] = {}
    measured = {**provenance(SEED), "joined": arguments.joined}
    before = earlier(arguments.out)
    if all(before.get(key) == measured[key] for key in ("sources", "transformers", "joined")):
        families = before["families"]
    look = joined_apart if arguments.joined else apart
    names = [name for name in arguments.only or sorted(known) if name not in families]
    with ThreadPool(arguments.at_once) as pool:
        started_s = time.monotonic()
        for name, found in pool.imap_unordered(lambda name: (name, look(name)), names):
            families[name] = found
            took_s = time.monotonic() - started_s
            print(f"{took_s:6.0f} s {name:28} {': '.join(filter(None, found))}", flush=True)
            counts = Counter(kind for kind, _ in families.values())
            write(arguments.out, {**measured, "counts": counts, "families": families})
    counts = Counter(kind for kind, _ in families.values())
    print(dict(counts))
    return 1 if counts[WRONG] else 0


def _large(arguments: argparse.Namespace) -> int:
    from bench.families import large_models

    models: dict[str, tuple[str, str]] = {}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as each_apart:
        names = arguments.only or list(large_models.LARGE)
        for name, found in zip(names, each_apart.imap(large_models.outcome, names), strict=True):
            models[name] = found
            print(f"{name:24} {': '.join(part for part in found if part)}", flush=True)
    counts = Counter(found for found, _ in models.values())
    print(dict(counts))
    result = {**provenance(SEED), "counts": counts, "models": models}
    write(arguments.out, result)
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
