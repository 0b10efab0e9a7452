"""Opens what computes in a peer, its engine and its draft model, and tells the owner of it."""

import argparse
import asyncio

from dht.errors import UserError
from node.device.hardware import Machine
from node.model import lean_transformers
from node.owner.reporter import Reporter, gibibytes
from node.profiling.quicker_dtype import default_dtype
from node.stage.draft_engine import SHARE_FOUND, DraftEngine, found_beside
from node.stage.local_engine import LocalEngine
from node.weights.store import WeightStore


async def open_drafts(
    arguments: argparse.Namespace, store: WeightStore, machine: Machine, reporter: Reporter
) -> DraftEngine | None:
    """The draft model that was named, or lies beside the model and takes little. Raises UserError
    and NetworkError."""
    named = arguments.draft
    model = found_beside(arguments.model) if named is None else named
    if model is None or named == "none":
        return None
    with reporter.phase("Opening the draft model"):
        share = 1.0 if named else SHARE_FOUND
        try:
            drafts = await DraftEngine.prepared(
                model,
                store,
                device=machine.torch_device,
                dtype=arguments.dtype or machine.dtype,
                memory_bytes=int(share * machine.lend_bytes),
            )
        except UserError as error:
            if named:
                raise
            reporter.say(f"Nothing is drafted by a model: {error}")
            return None
    taken = gibibytes(drafts.memory_bytes)
    reporter.event("drafts", model=model, memory_bytes=drafts.memory_bytes)
    reporter.say(f"{model} drafts for it, with {taken} of what is lent")
    return drafts


async def open_engine(
    arguments: argparse.Namespace, store: WeightStore, machine: Machine, reporter: Reporter
) -> LocalEngine:
    """The engine on this machine, measured. Raises UserError."""
    dtype = arguments.dtype
    if machine.hint and not dtype:
        reporter.say(machine.hint)
    with reporter.phase("Measuring this machine"):
        await asyncio.to_thread(lean_transformers.prepare_transformers)
        if dtype is None:
            found = await asyncio.to_thread(default_dtype, store, machine, arguments.threads)
            dtype = found.dtype
            if found.seconds:
                reporter.event("dtype", dtype=dtype, seconds=dict(found.seconds))
                reporter.say(found.reason)
        engine = await LocalEngine.open(
            store,
            name=arguments.model_name,
            torch_device=machine.torch_device,
            dtype=dtype,
            quantize=arguments.quantize,
            memory_bytes=machine.lend_bytes,
            threads=arguments.threads,
            kernels=not arguments.no_kernels,
            keep_prefixes=not arguments.no_prefix_cache,
            refresh_profile=arguments.refresh_profile,
            foretells=arguments.draft != "none",
        )
    fastest = max(engine.tokens_per_s)
    reporter.event(
        "measured",
        tokens_per_s=list(engine.tokens_per_s),
        layers_max=len(engine.tokens_per_s),
        fit_error=engine.profile.fit_error,
        remembered=engine.remembered,
    )
    reporter.say(
        f"Up to {len(engine.tokens_per_s)} of {engine.spec.layers} layers fit"
        f" ({engine.precision});"
        f" {engine.tokens_per_s[-1]:.0f} tokens/s with all of them, {fastest:.0f} with one"
    )
    if engine.heads is not None:
        reporter.say("The model's own head drafts for it where this machine holds the last layer")
    reporter.say(f"It serves {engine.spec.name} with fingerprint {engine.spec.fingerprint}")
    return engine
