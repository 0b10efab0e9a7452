"""The models that a gateway answers for: opened when they are asked for, few of them at a time.

The gateway's owner says which ones these are. A stranger could announce a model whose chat template
never ends, or whose tokenizer takes for ever; such a model is not opened here.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from client.gateway.answering.answers import as_api_error
from client.gateway.answering.service import CompletionService
from client.gateway.errors import ApiError, unavailable
from client.swarm.swarm import Swarm
from client.view.view import SwarmView
from coordinator.plans.catalogue.served import ServedModel, served_model
from dht.errors import NetworkError, SwarmError, UserError
from dht.messages.types import ModelSpec, NodeRecord
from dht.process.json_file import Json
from dht.process.supervision import end_all, loop_s

logger = logging.getLogger(__name__)

OPEN_MAX = 8
"""Maximum models that are open at a time."""
NAMED_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """How open models are kept."""

    again_s: float = 30.0
    """Time after which what a model misses is looked for again, where no peer had it."""


MODELS = ModelsConfig()
FIGURES = ("fingerprint", "layers", "covered", "replicas", "tokens_per_s", "precisions")
"""What the list of models says of each, as ``anabranch models --json`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    swarm: Swarm
    service: CompletionService
    whole: "Callable[[], Coroutine[Any, Any, OpenModel | None]] | None" = None
    """Makes the same with what was missing when it was opened, such as its tokenizer; waits for a
    first peer as long as an answer would. It is None where nothing is missing, and makes None where
    no peer has it. Raises UserError, SwarmError, NetworkError."""


Opener = Callable[[str], AbstractAsyncContextManager[OpenModel]]


@dataclass(slots=True)
class _Kept:
    """An open model, or one that is being opened, in a task of its own."""

    ready: asyncio.Future[OpenModel]
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    users: int = 0
    task: asyncio.Task[None] | None = None
    completing: asyncio.Task[OpenModel | None] | None = None
    """Looks for what is missing, for all who wait for it."""
    looked_s: float = -math.inf
    """When that ended last without it, by the event loop's clock."""
    counted: tuple[ModelSpec, Mapping[str, NodeRecord], ServedModel] | None = None
    """What was served by the records that were read last, and those."""

    def served(self, view: SwarmView) -> ServedModel | None:
        """What is served of the model, counted once for each reading of records; None: not known
        which model it is."""
        if (spec := view.spec) is None:
            return None
        counted = self.counted
        if counted is None or counted[0] is not spec or counted[1] is not view.nodes:
            counted = self.counted = (spec, view.nodes, served_model(spec, view.nodes))
        return counted[2]


class GatewayModels:
    """Opens models by name, and closes the one unused for longest where there are too many."""

    def __init__(self, names: Sequence[str], opener: Opener, open_max: int = OPEN_MAX) -> None:
        """``names`` are served, the first where a request names none."""
        self._names = tuple(names)
        self._opener = opener
        self._open_max = open_max
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """Open models by name, the one unused for longest first."""
        self._started_s = int(time.time())

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[OpenModel]:
        """A model, open within the block; raises ApiError (404, 503)."""
        name = self.checked(name)
        kept = self._kept.get(name) or await self._begin(name)
        self._kept.move_to_end(name)
        kept.users += 1
        try:
            yield await asyncio.shield(kept.ready)
        finally:
            kept.users -= 1

    @asynccontextmanager
    async def ready(self, name: str | None) -> AsyncIterator[OpenModel]:
        """A model as :meth:`use` gives it, with what was missing when it was opened where its peers
        have that now: it may have been opened before there were any. Raises ApiError."""
        async with self.use(name) as model:
            kept = self._kept[self.checked(name)]
            yield await self._completed(kept, model)

    async def _completed(self, kept: _Kept, model: OpenModel) -> OpenModel:
        if model.whole is None or loop_s() - kept.looked_s < MODELS.again_s:
            return model
        if kept.completing is None or kept.completing.done():
            kept.completing = asyncio.create_task(model.whole())
            kept.completing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            found = await asyncio.shield(kept.completing)
        except (UserError, SwarmError, NetworkError) as error:
            raise as_api_error(error) from None
        if found is None:
            kept.looked_s = loop_s()
        else:
            kept.ready = asyncio.get_running_loop().create_future()
            kept.ready.set_result(found)
        return kept.ready.result()

    def checked(self, name: str | None) -> str:
        """The name of a model that is served here; raises ApiError (404)."""
        if not name:  # programs send an empty one where nobody chose
            return self._names[0]
        if name not in self._names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here;"
                f" {', '.join(map(repr, self._names[:NAMED_MAX]))} {_are(len(self._names))}",
                param="model",
                code="model_not_found",
            )
        return name

    async def _begin(self, name: str) -> _Kept:
        while len(self._kept) >= self._open_max:
            idle = next((each for each, kept in self._kept.items() if not kept.users), None)
            if idle is None:
                raise unavailable(f"{len(self._kept)} models are in use here")
            await self._end(self._kept.pop(idle))
            if name in self._kept:  # another request opened it meanwhile
                return self._kept[name]
        kept = self._kept[name] = _Kept(asyncio.get_running_loop().create_future())
        kept.task = asyncio.create_task(self._keep(name, kept))
        return kept

    async def _keep(self, name: str, kept: _Kept) -> None:
        """Open the model, and hold it open in this one task until it is to be closed."""
        try:
            async with self._opener(name) as model:
                kept.ready.set_result(model)
                await kept.closing.wait()
        except Exception as error:  # noqa: BLE001  whoever waits for the model gets it
            if kept.ready.done():
                logger.warning("%s is closed: %s", name, error)
            else:
                kept.ready.set_exception(_failed(error))
                kept.ready.exception()  # it is no fault that nobody waits any more
        finally:
            kept.ready.cancel()  # where it was neither opened nor failed
            if self._kept.get(name) is kept:
                del self._kept[name]

    async def _end(self, kept: _Kept) -> None:
        if kept.completing is not None:
            await end_all((kept.completing,))
        kept.closing.set()
        if kept.task is not None:
            await asyncio.gather(kept.task, return_exceptions=True)

    async def close(self) -> None:
        while self._kept:
            _, kept = self._kept.popitem()
            if not kept.ready.done() and kept.task is not None:
                kept.task.cancel()
            await self._end(kept)

    def list(self) -> Json:
        """The models that are served here, in OpenAI's form."""
        return {"object": "list", "data": [self.entry(name) for name in self._names]}

    def entry(self, name: str) -> Json:
        """One model; raises ApiError (404). What the network says of it is known once it is
        open."""
        kept = self._kept.get(self.checked(name))
        served = None
        if kept is not None and kept.ready.done() and kept.ready.exception() is None:
            served = kept.served(kept.ready.result().swarm.view)
        figures = {} if served is None else served.figures
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "anabranch",
            "max_model_len": figures.get("context_tokens"),
            **{figure: figures.get(figure) for figure in FIGURES},
        }


def _failed(error: Exception) -> ApiError:
    return unavailable(f"this model cannot be opened now: {error}")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
