"""How far each family's logits are from ``transformers``', in float32 and in bfloat16.

Tiny models with random weights (:mod:`testing.tiny_families`), split over two stages. Every
position behind a prefill is decoded with the text given, so that one early difference does not
change all that follows. The reference is ``transformers`` in float32; its own bfloat16 stands
beside ours.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from bench import report
from dht.errors import UserError
from dht.messages.session import Sampling
from node.engine.engine import Engine, EngineConfig, WorkItem
from node.weights.store import WeightStore
from testing.tiny_families import FAMILIES, REFUSED, VOCAB, make

PREFILL, TOKENS = 40, 72


def parse() -> argparse.Namespace:
    parser = report.parser_of("bench.families.outline", __doc__)
    parser.add_argument("--only", nargs="*", help="names of families; all by default")
    return parser.parse_args()


def stages(directory: Path, dtype: str) -> list[Engine]:
    """The model in two halves."""
    engines: list[Engine] = []
    for half in (0, 1):
        store = WeightStore.open(str(directory))
        config = EngineConfig(store=store, name="tiny", dtype=dtype, memory_bytes=64 << 20)
        engine = Engine(config)
        layers = engine.spec.layers
        engine.load(*((0, layers // 2) if half == 0 else (layers // 2, layers)))
        engines.append(engine)
    return engines


def logits_of(directory: Path, dtype: str, ids: list[int]) -> torch.Tensor:
    """Logits behind each position from the prefill's last on, ``[positions, vocabulary]``."""
    engines = stages(directory, dtype)
    leave = engines[-1].loaded.forward.leave
    rows: list[torch.Tensor] = []

    def listening(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(leave(hidden).float())
        return rows[-1]

    engines[-1].loaded.forward.leave = listening  # type: ignore[method-assign]
    for engine in engines:
        assert engine.kv.reserve("s", len(ids)) is None
    cuts = [0, PREFILL, *range(PREFILL + 1, len(ids) + 1)]
    for first, last in itertools.pairwise(cuts):
        hidden: torch.Tensor | None = None
        for engine in engines:
            start, end = engine.held
            item = WorkItem(
                session="s",
                start=start,
                end=end,
                position=first,
                token_ids=tuple(ids[first:last]) if start == 0 else None,
                hidden=hidden,
                sampling=Sampling() if end == engine.spec.layers else None,
            )
            result = engine.step([item])[0]
            assert result.error is None, result.error
            hidden = result.hidden
    return torch.cat(rows)


def measure(name: str) -> dict[str, Any]:
    """Errors of one family against ``transformers`` in float32."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        model = make(Path(directory), name)
        expected = model(ids[None]).logits[0, PREFILL - 1 :]
        short = type(model).from_pretrained(directory, dtype=torch.bfloat16).eval()
        theirs = short(ids[None]).logits[0, PREFILL - 1 :].float()
        structure = stages(Path(directory), "float32")[0].layout.structure
        ours = {d: logits_of(Path(directory), d, ids.tolist()) for d in ("float32", "bfloat16")}
    best = expected.argmax(-1)

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).abs().max())

    def agreement(logits: torch.Tensor) -> float:
        return float((logits.argmax(-1) == best).float().mean())

    return {
        "layers": model.config.get_text_config().num_hidden_layers,
        "sessions_share_a_call": structure.packed,
        "largest_logit": float(expected.abs().max()),
        "max_logit_error_float32": error(ours["float32"]),
        "greedy_agreement_float32": agreement(ours["float32"]),
        "max_logit_error_bfloat16": error(ours["bfloat16"]),
        "greedy_agreement_bfloat16": agreement(ours["bfloat16"]),
        "transformers_max_logit_error_bfloat16": error(theirs),
        "transformers_greedy_agreement_bfloat16": agreement(theirs),
    }


def refusal(name: str) -> str:
    """The reason why a family is refused."""
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory), name)
        try:
            stages(Path(directory), "float32")
        except UserError as error:
            return str(error).partition("cannot be served yet: ")[2]
    raise AssertionError(f"{name} is served")


def main() -> int:
    arguments = parse()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    console = Console()
    names = arguments.only or list(FAMILIES)
    families: dict[str, Any] = {}
    for name in names:
        families[name] = measure(name)
        console.print(f"{name}: {families[name]}", highlight=False)
    result = {
        "provenance": report.provenance(seed=3),
        "families": families,
        "refused": {} if arguments.only else {name: refusal(name) for name in REFUSED},
    }
    report.write(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
