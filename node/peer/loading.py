"""Opens what computes in a peer, its engine and what drafts for it, and tells the owner of it."""

import argparse
import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

from dht.errors import UserError
from node.device.hardware import Machine
from node.engine.engine import EngineConfig
from node.model import lean_transformers
from node.model.eagle_head import is_eagle_head
from node.model.opening import open_lean
from node.owner.reporter import Reporter, gibibytes
from node.profiling.quicker_dtype import default_dtype
from node.stage.draft_engine import DRAFT_ENGINE, DraftEngine, found_beside
from node.stage.local_engine import LocalEngine
from node.weights.store import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What drafts for the model: a model beside it, a head, or neither."""

    engine: DraftEngine | None = None
    head: WeightStore | None = None
    """An EAGLE-3 head."""
    model: str = ""
    """Where it is from."""

    def left(self, machine: Machine) -> Machine:
        """The machine without what a draft model takes of it; what a head takes depends on the
        layers that are held."""
        if self.engine is None:
            return machine
        return replace(machine, lend_bytes=machine.lend_bytes - self.engine.memory_bytes)


async def open_drafts(
    arguments: argparse.Namespace, store: WeightStore, machine: Machine, reporter: Reporter
) -> Drafting:
    """The head or draft model that was named, or that lies beside the model and takes little.
    Raises UserError and NetworkError."""
    named = arguments.draft
    model = found_beside(arguments.model) if named is None else named
    if model is None or named == "none":
        return Drafting()
    # One that merely lies there is worth a word where it drafts.
    with reporter.phase("Opening the draft model") if named else nullcontext():
        share = 1.0 if named else DRAFT_ENGINE.share_found
        try:
            files = await asyncio.to_thread(open_lean, model)
            if is_eagle_head(files):
                return Drafting(head=files, model=model)
            drafts = await DraftEngine.prepared(
                model,
                files,
                store,
                device=machine.torch_device,
                dtype=arguments.dtype or machine.dtype,
                memory_bytes=int(share * machine.lend_bytes),
            )
        except UserError as error:
            if named:
                raise
            reporter.event("undrafted", model=model, message=str(error))
            return Drafting()
    taken = gibibytes(drafts.memory_bytes)
    reporter.event("drafts", model=model, memory_bytes=drafts.memory_bytes)
    reporter.say(f"{model} drafts for it, with {taken} of what is lent")
    return Drafting(engine=drafts, model=model)


async def open_engine(
    arguments: argparse.Namespace,
    store: WeightStore,
    drafting: Drafting,
    machine: Machine,
    reporter: Reporter,
) -> LocalEngine:
    """The engine on this machine, measured, with what drafts for it. Raises UserError."""
    dtype = arguments.dtype
    if machine.hint and not dtype:
        reporter.say(machine.hint)
    with reporter.phase("Measuring this machine"):
        await asyncio.to_thread(lean_transformers.prepare_transformers)
        if dtype is None:
            found = await asyncio.to_thread(
                default_dtype, store, machine, arguments.threads, arguments.quantize
            )
            dtype = found.dtype
            if found.seconds:
                reporter.event("dtype", dtype=dtype, seconds=dict(found.seconds))
                reporter.say(found.reason)
        engine = await LocalEngine.open(
            EngineConfig(
                store=store,
                name=arguments.model_name,
                device=machine.torch_device,
                dtype=dtype,
                quantize=arguments.quantize,
                memory_bytes=machine.lend_bytes,
                threads=arguments.threads,
                kernels=not arguments.no_kernels,
                keep_prefixes=not arguments.no_prefix_cache,
            ),
            refresh_profile=arguments.refresh_profile,
            foretells=arguments.draft != "none",
            head=drafting.head,
            insists=arguments.draft is not None,
        )
        engine.drafts = drafting.engine
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
        head = drafting.model if engine.heads.feature_layers else "The model's own head"
        reporter.say(f"{head} drafts for it where this machine holds the last layer")
    reporter.say(f"It serves {engine.spec.name} with fingerprint {engine.spec.fingerprint}")
    return engine
