"""Passes on the small text files of this peer's model, so that clients need no files of it."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from dht.budget import TEXT_BYTES, TEXT_STREAMS, Budget
from dht.checkpoints.model_files import root_of
from dht.checkpoints.text_files import CONFIGURATIONS, text_bytes, texts_in
from dht.errors import NetworkError, UserError, reason_of
from dht.messages import codec
from dht.messages.peer import (
    PEER_BOUNDS,
    TextFile,
    TextPiece,
    TextRequest,
    TextsFound,
    TextsRequest,
)
from dht.process.whole_file import Stamp, stamp_of
from dht.transport.interface import TEXT_PROTOCOL, Stream, Transport
from dht.transport.requests import answer, next_request
from node.links.lent_traffic import LentTraffic

logger = logging.getLogger(__name__)

REQUESTS_MAX = 2048
"""Maximum requests on one stream."""
STREAM_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTexts:
    """The text files that a peer passes on. They may change while it runs; what it has loaded does
    not, so a file that has changed is passed on no more."""

    root: str
    directory: Path
    found: TextsFound
    _unchanged: dict[str, Stamp] = field(default_factory=dict)
    """Stamp under which a file was last seen to be as ``found`` lists it, by name."""

    @classmethod
    def of(cls, directory: Path, weights: str) -> "ServedTexts":
        """The text files in ``directory``, of a model whose weight files have digest ``weights``.

        Raises UserError for a file that cannot be read.
        """
        files = tuple(
            TextFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in texts_in(directory)
        )
        root = root_of({file.name: file.sha256 for file in files}, weights)
        return cls(root=root, directory=directory, found=TextsFound(files=files, weights=weights))

    def piece(self, sha256: str, start: int) -> bytes:
        """A piece of the file with this hash; nothing beyond its end, and of a file that is unknown
        or has changed."""
        listed = next((file for file in self.found.files if file.sha256 == sha256), None)
        if listed is None:
            return b""
        path = self.directory / listed.name
        try:
            self._check_unchanged(path, listed)
            if listed.name in CONFIGURATIONS:
                return (text_bytes(self.directory, listed.name) or b"")[
                    start : start + PEER_BOUNDS.text_piece_bytes
                ]
            with path.open("rb") as file:
                file.seek(start)
                return file.read(PEER_BOUNDS.text_piece_bytes)
        except (OSError, UserError) as error:
            logger.warning(
                "%s: %s. Clients get it from this peer no more; put it back, or start again",
                path,
                reason_of(error),
            )
            return b""

    def _check_unchanged(self, path: Path, listed: TextFile) -> None:
        """Raise UserError or OSError for a file that is no longer as it is listed."""
        stamp = stamp_of(path)
        if self._unchanged.get(listed.name) == stamp:
            return
        data = text_bytes(self.directory, listed.name)
        if data is None or hashlib.sha256(data).hexdigest() != listed.sha256:
            raise UserError("it has changed since this peer began to serve")
        self._unchanged[listed.name] = stamp


class TextServer:
    """Answers requests for text files, within bounds per peer and in all."""

    def __init__(
        self,
        transport: Transport,
        texts: ServedTexts,
        traffic: LentTraffic | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget = budget or Budget()
        self._transport = transport
        self._texts = texts
        self._traffic = traffic or LentTraffic()
        self._streams = budget.held(TEXT_STREAMS)
        self._bytes = budget.rate(TEXT_BYTES)

    async def start(self) -> None:
        await self._transport.serve(TEXT_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        share = self._streams.of(stream.remote_peer_id)
        share.take(1)
        try:
            async with asyncio.timeout(STREAM_LIMIT_S):
                for _ in range(REQUESTS_MAX):
                    await self._answer(stream)
        finally:
            share.give_back(1)

    async def _answer(self, stream: Stream) -> None:
        match await next_request(stream, self._budget):
            case TextsRequest(root=root):
                known = root == self._texts.root
                await answer(stream, self._texts.found if known else TextsFound(files=()))
            case TextRequest(sha256=sha256, start=start):
                now_s = asyncio.get_running_loop().time()
                if not self._bytes.take(stream.remote_peer_id, PEER_BOUNDS.text_piece_bytes, now_s):
                    raise NetworkError("this peer took its share of text files")
                await self._traffic.wait_up()
                data = await asyncio.to_thread(self._texts.piece, sha256, start)
                await answer(stream, TextPiece(start=start), data)
            case _:
                raise codec.MalformedError("this stream takes requests for text files")
