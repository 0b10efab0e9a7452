"""A swarm as its callers see it: connect, begin an answer, read its pieces, close."""

import argparse
import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, Unpack

from client.answer.answer import Answer, AnswerRequest, Piece
from client.answer.generation import GenerationOptions, NamedOptions
from client.errors import StatusCallback
from client.session.driver import SessionDriver
from client.swarm.narrator import Narrator
from client.swarm.one_answer import Generation
from client.swarm.peer_texts import fetched_texts
from client.text.chat_prompt import Messages, chat_ids, chat_template_of
from client.text.tokenizer import ModelText
from client.view.reader import ReaderConfig, SwarmReader
from coordinator.plans.catalogue.reading import network_models
from coordinator.plans.catalogue.served import only_model
from coordinator.problem.model_pin import ModelPin, checked_fingerprint, named_peers
from dht.checkpoints.gguf_model import hub_root, model_directory
from dht.checkpoints.hub import HubId, local_path, served_name
from dht.checkpoints.model_files import directory_root, read_config
from dht.errors import NetworkError, UserError
from dht.identity.peer_id import short_name
from dht.messages.types import ModelSpec
from dht.networks.connecting import observe
from dht.records.directory import DEFAULT_NETWORK
from dht.swarm_options import settle_swarm
from dht.transport.config import TransportKind
from dht.transport.interface import Transport

logger = logging.getLogger(__name__)

REFUSED_S = 3.0
"""An attempt to enter that fails sooner was refused; a later one met peers that were too busy, or
nobody, and is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig(ReaderConfig):
    """How a client enters and looks at the swarm, and whose weights it wants. Raises UserError."""

    transport: TransportKind = TransportKind.AUTO
    fingerprint: str = ""
    """Fingerprint of the model, or its first 16 digits or more. Empty: the model's files say which
    it is, or else the first of the named peers that serves it."""
    piece_tokens_max: int = 256
    """Maximum tokens of a piece: a peer may bring 65,536 at once, whose text and calls take seconds
    to read. Others have the event loop between pieces."""

    def __post_init__(self) -> None:
        if self.transport not in set(TransportKind):
            wanted = " or ".join(TransportKind)
            raise UserError(f"transport is {self.transport!r}; it must be {wanted}")
        object.__setattr__(self, "transport", TransportKind(self.transport))
        for name, least in (("wait_s", 0), ("piece_tokens_max", 1)):
            value, right = getattr(self, name), False
            with suppress(TypeError):
                right = value >= least  # NaN is not
            if not right:
                raise UserError(f"{name} is {value!r}; it must be {least} or more", field=name)


class Swarm:
    """A connection to the peers that serve one model; :meth:`connect` makes it."""

    def __init__(
        self,
        transport: Transport,
        text: ModelText,
        config: SwarmConfig,
        on_status: StatusCallback | None = None,
        named: tuple[str, ...] = (),
    ) -> None:
        """``named`` are the peers that the user named, whose word on the model counts first.

        Raises UserError for a fingerprint that is none.
        """
        self.transport = transport
        self.text = text
        """The model's name, tokenizer and directory."""
        self.config = config
        self.named = named
        """The peers that the user named."""
        self._leave: Callable[[], Awaitable[None]] | None = None
        """Leaves a swarm that was connected by ``await``."""
        self.narrator = narrator_of(on_status)
        """Passes on what is told of the swarm, and tells what is waited for."""
        self.reader = SwarmReader(
            transport,
            text.name,
            config,
            self.narrator,
            pin=ModelPin(
                root=text.root, fingerprint=checked_fingerprint(config.fingerprint), named=named
            ),
            directory=text.directory,
        )
        """Reads the DHT; for callers that want to read it now."""
        self.view = self.reader.view
        """Which peers serve which layers, as read last."""

    @classmethod
    def connect(
        cls,
        initial_peers: str | Sequence[str] = (),
        *,
        model: str = "",
        config: SwarmConfig | None = None,
        on_status: StatusCallback | None = None,
    ) -> "Connecting[Self]":
        """A swarm reached through ``initial_peers``, for ``async with``.

        In a notebook ``swarm = await Swarm.connect(…)`` keeps it until ``await swarm.close()``.

        These are multiaddresses, or an invitation, which also says the network, the model where
        ``model`` is empty, and its fingerprint. Without any they are those of ``ANABRANCH_PEERS``,
        or else the network that this user's commands used last.

        ``model`` is a local directory, a hub id (its tokenizer is used) or the name that peers
        serve it under: :meth:`begin` takes token ids only, until :meth:`ready_text`. Empty: the
        only model that the network announces. Files hold the peers to their weights; a name follows
        the first of ``initial_peers`` that serves it, unless ``config.fingerprint`` is given.

        Entering raises UserError for malformed addresses, for a model that is not on the hub and
        where it is not clear which network or model is meant, HubUnreachableError, and NetworkError
        when nobody answers: at once where connections are refused, else after ``config.wait_s``.
        """
        return Connecting(
            lambda: cls._connected(initial_peers, model, config or SwarmConfig(), on_status)
        )

    @classmethod
    @asynccontextmanager
    async def _connected(
        cls,
        initial_peers: str | Sequence[str],
        model: str,
        config: SwarmConfig,
        on_status: StatusCallback | None,
    ) -> AsyncIterator[Self]:
        narrator = narrator_of(on_status)
        initial_peers, model, config = _meant(initial_peers, model, config, narrator)
        config = replace(config, fingerprint=checked_fingerprint(config.fingerprint))
        text = _text_of(model) if model else None
        if isinstance(text, HubId):
            text = await _hub_text(text, config, narrator)
        transport = await _entered(initial_peers, config, narrator)
        named = named_peers(initial_peers)
        if text is None:
            with narrator.waiting(lambda: "which models are served is being read"):
                text = ModelText(name=await _only_name(transport, config.network, named))
        async with cls.over(transport, text, config, narrator, named) as swarm:
            yield swarm

    @classmethod
    @asynccontextmanager
    async def over(
        cls,
        transport: Transport,
        text: ModelText,
        config: SwarmConfig,
        on_status: StatusCallback | None = None,
        named: tuple[str, ...] = (),
    ) -> AsyncIterator[Self]:
        """A swarm over a transport that is open, and that is closed at the end."""
        try:
            swarm = cls(transport, text, config, on_status, named)
            async with AsyncExitStack() as stack:
                with swarm.narrator.waiting(lambda: "who serves the model is being read"):
                    await stack.enter_async_context(swarm.reader.reading())
                yield swarm
        finally:
            await transport.close()

    async def close(self) -> None:
        """Leave a swarm that was connected by ``await``; at the end of ``async with`` it is left by
        itself."""
        if self._leave is not None:
            await self._leave()

    def is_vouched_for(self, spec: ModelSpec) -> bool:
        """Whether more than a stranger's word says that ``spec`` is the model that is meant: its
        files, its fingerprint, or a peer that the user named."""
        if self.text.root or self.config.fingerprint:
            return True
        nodes = self.view.nodes
        return any(p in nodes and nodes[p].model.serves_with(spec) for p in self.named)

    async def ready_text(self) -> None:
        """Take the model's tokenizer and text files from its peers, where none are here.

        Waits for a first peer as long as an answer would. Where no peer has them, that is said, and
        prompts are token ids. Raises UnavailableError where no peer came, and UserError for a
        tokenizer that cannot be read.
        """
        if self.text.directory is not None:
            return
        spec = await self.reader.ready_spec()
        same = {p: r for p, r in self.view.nodes.items() if r.model.serves_with(spec)}
        try:
            directory = await fetched_texts(self.transport, spec.root, same)
        except NetworkError as error:
            self.narrator(str(error))
            return
        self.text = await asyncio.to_thread(ModelText.load, self.text.name, directory, spec.root)

    def begin(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Generation:
        """An answer to iterate over, whose :meth:`Generation.answer` has the figures after.

        ``prompt`` is text or token ids. Options may be given as one object or by name, e.g.
        ``max_new_tokens=64``.
        """
        if options is not None and named:
            raise TypeError("give options as one object or by name, not both")
        if options is None:
            options = GenerationOptions(**named)
        if not isinstance(options, GenerationOptions):
            raise TypeError(f"{options!r} is no GenerationOptions; by name: max_new_tokens=64")
        return Generation(self, prompt, options)

    async def stream(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they come. Closing the iterator early frees the session.

        A text is read by the tokenizer of the model's peers where none is here.
        """
        if self._lacks_text_for(prompt):
            await self.ready_text()
        async with aclosing(aiter(self.begin(prompt, options, **named))) as pieces:
            async for piece in pieces:
                yield piece

    def _lacks_text_for(self, prompt: str | Sequence[int]) -> bool:
        return isinstance(prompt, str) and self.text.directory is None

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer with its figures; a text is read as :meth:`stream` says."""
        if self._lacks_text_for(prompt):
            await self.ready_text()
        running = self.begin(prompt, options, **named)
        async for _ in running:
            pass
        return running.answer()

    async def chat_prompt(self, messages: Messages) -> tuple[int, ...]:
        """The token ids of a conversation in the form that the model was trained on.

        The model's text files are taken from its peers where none are here. Raises as
        :meth:`ready_text`, and UserError where the model has no template or that refuses these
        messages.
        """
        await self.ready_text()
        return await asyncio.to_thread(_chat_ids, self.text, messages)

    async def stream_chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer to a conversation, as they come; raises as :meth:`chat`."""
        prompt = await self.chat_prompt(messages)
        async with aclosing(self.stream(prompt, options, **named)) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(
        self,
        messages: Messages,
        options: GenerationOptions | None = None,
        **named: Unpack[NamedOptions],
    ) -> Answer:
        """The whole answer to a conversation, written by the model's own chat template.

        ``messages`` are in OpenAI's form, ``[{"role": "user", "content": "Hello"}]``, or the text
        of one message. Raises UserError where the model has no chat template
        (:meth:`generate` continues a text), or refuses these messages.
        """
        return await self.generate(await self.chat_prompt(messages), options, **named)

    def session(self, request: AnswerRequest) -> SessionDriver:
        """A session for ``request``, which opens once its tokens are read."""
        return SessionDriver(
            self.transport,
            self.view,
            request,
            wait_s=self.config.wait_s,
            look=self.reader.look,
            on_status=self.narrator,
        )


S = TypeVar("S", bound=Swarm)


class Connecting(AbstractAsyncContextManager[S]):
    """A swarm on the way: ``async with`` enters and leaves it, ``await`` only enters."""

    def __init__(self, connected: Callable[[], AbstractAsyncContextManager[S]]) -> None:
        self._connected = connected
        self._entered: AbstractAsyncContextManager[S] | None = None

    async def __aenter__(self) -> S:
        entered = self._connected()
        swarm = await entered.__aenter__()
        self._entered = entered
        return swarm

    async def __aexit__(self, *exc: Any) -> bool | None:
        if self._entered is None:
            raise RuntimeError("this swarm was not entered")
        return await self._entered.__aexit__(*exc)

    def __await__(self) -> Generator[Any, None, S]:
        return self._kept().__await__()

    async def _kept(self) -> S:
        """The swarm, kept by a task of its own: each cell of a notebook is another task, and a
        context is left by the task that entered it."""
        ready: asyncio.Future[S] = asyncio.get_running_loop().create_future()
        leaving = asyncio.Event()

        async def keep() -> None:
            async with self as swarm:
                ready.set_result(swarm)
                await leaving.wait()

        keeper = asyncio.create_task(keep(), name="anabranch client")

        async def leave() -> None:
            leaving.set()
            await asyncio.shield(keeper)

        try:
            waited: set[asyncio.Future[Any]] = {keeper, ready}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            keeper.cancel()
            raise
        if not ready.done():
            await keeper  # raises why it did not come
        swarm = ready.result()
        swarm._leave = leave
        return swarm


def _meant(
    initial_peers: str | Sequence[str], model: str, config: SwarmConfig, say: StatusCallback
) -> tuple[list[str], str, SwarmConfig]:
    """Addresses, model and configuration that a caller means, as for the commands' options.

    Raises UserError.
    """
    try:
        given = [initial_peers] if isinstance(initial_peers, str) else initial_peers
        typed = [str.strip(each) for each in given]
    except TypeError:
        raise UserError(f"{initial_peers!r} is no invitation and no list of addresses") from None
    arguments = argparse.Namespace(
        invitation=None,
        initial_peers=typed,
        network=None if config.network == DEFAULT_NETWORK else config.network,
        model=model or None,
        fingerprint=config.fingerprint,
    )
    settle_swarm(arguments, model="", say=say)
    config = replace(config, network=arguments.network, fingerprint=arguments.fingerprint)
    return arguments.initial_peers, arguments.model, config


def named_of(entry: str) -> str:
    """The name in the swarm of a model given as a directory, a hub id, a name, or NAME=FINGERPRINT.

    Raises UserError.
    """
    name, _ = _entry(entry)
    return served_name(name)


def _entry(entry: str) -> tuple[str, str]:
    """A model as for :meth:`Swarm.connect`, and its fingerprint or nothing. Raises UserError."""
    name, _, fingerprint = entry.partition("=")
    if not fingerprint or local_path(entry):
        return entry, ""
    return name, checked_fingerprint(fingerprint)


@asynccontextmanager
async def model_beside(swarm: Swarm, entry: str, on_status: StatusCallback) -> AsyncIterator[Swarm]:
    """Another model of the same network, over the same connection, for ``async with``.

    ``entry`` is as for :func:`named_of`; with a fingerprint the peers' text files are taken, else
    those of the directory or the hub. Raises as :meth:`Swarm.connect`.
    """
    name, fingerprint = await asyncio.to_thread(_entry, entry)
    config = replace(swarm.config, fingerprint=fingerprint)
    text = ModelText(name=name) if fingerprint else await asyncio.to_thread(_text_of, name)
    if isinstance(text, HubId):
        text = await _hub_text(text, config, on_status)
    other = Swarm(swarm.transport, text, config, on_status, swarm.named)
    async with other.reader.reading():
        yield other


def _chat_ids(text: ModelText, messages: Messages) -> tuple[int, ...]:
    template = chat_template_of(text)
    if template is None or text.tokenizer is None:
        lacks = "tokenizer here" if text.tokenizer is None else "chat template"
        raise UserError(f"{text.name} has no {lacks}: generate() continues a text or token ids")
    return chat_ids(template, text.tokenizer, messages)


async def _only_name(transport: Transport, network: str, named: tuple[str, ...]) -> str:
    """The name of the only model that the network announces; closes the transport on an error."""
    try:
        return only_model(await network_models(transport, network, named), network).name
    except BaseException:
        await transport.close()
        raise


async def _hub_text(hub_id: HubId, config: SwarmConfig, on_status: StatusCallback) -> ModelText:
    """The text side of a model on the hub. Where that cannot be reached and a fingerprint holds the
    peers to the model, its name alone."""
    try:
        files = await asyncio.to_thread(hub_root, hub_id)  # and the root of the commit listed
        return await asyncio.to_thread(ModelText.load, str(hub_id), *files)
    except NetworkError as error:
        if not config.fingerprint:
            raise
        on_status(f"{error}; the model's text files are taken from its peers")
        return ModelText(name=str(hub_id))


async def _entered(
    initial_peers: Sequence[str], config: SwarmConfig, narrator: Narrator
) -> Transport:
    """A transport into the network; waits for a first peer as long as an answer would.

    Raises as :func:`dht.networks.connecting.observe`.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + config.wait_s
    who = ", ".join(map(short_name, named_peers(initial_peers)))
    with narrator.waiting(lambda: f"no answer yet from peer {who}"):
        while True:
            began_s = loop.time()
            try:
                return await observe(initial_peers, config.transport)
            except NetworkError as error:
                if loop.time() < began_s + REFUSED_S or loop.time() >= deadline_s:
                    raise
                narrator(f"waiting: {error}")


def narrator_of(on_status: StatusCallback | None) -> Narrator:
    """A narrator that tells ``on_status``, or else the log."""
    if isinstance(on_status, Narrator):
        return on_status
    return Narrator(on_status or (lambda line: logger.info("%s", line)))


def _text_of(model: str) -> ModelText | HubId:
    """The text side of a directory or a bare name; for a hub id, where it is to be fetched."""
    if (directory := model_directory(model)) is not None:
        text = ModelText.load(served_name(model), directory, directory_root(directory))
        if text.tokenizer is None:
            read_config(directory)  # which says of a directory of something else what it lacks
        return text
    hub_id = HubId.parse(model)
    if hub_id is not None:
        return hub_id
    if "/" in model or model.startswith((".", "~")) or not model:
        raise UserError(
            f"{model!r} is not a directory or GGUF file; give one, a hub id or a model's name"
        )
    return ModelText(name=model)
