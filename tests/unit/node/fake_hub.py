"""A hub on this machine: the requests that huggingface_hub makes, with faults on demand."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHARDS = (".safetensors", ".gguf")
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent_bytes: int = 0


@dataclass
class FakeHub:
    """``models`` by ``org/name``: file contents by name. Faults apply to shards only."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None
    """Needed to see anything at all."""
    cut_at: list[int] = field(default_factory=list)
    """The next responses with a shard's body break off after so many bytes."""
    flip: int = 0
    """So many responses with a whole shard come with a flipped bit."""
    status: int | None = None
    """Answer everything with this status."""
    answers: list[tuple[int, dict[str, str], bytes] | None] = field(default_factory=list)
    """Status, headers and body of the next responses with a shard's body; None: the right ones."""
    stalls: str = ""
    """Requests whose path ends so get no answer while this is set."""
    unmeasured: bool = False
    """Say no length of shards' bodies; the end of the connection is theirs."""
    ignore_ranges: bool = False
    asked: list[Asked] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, directory: Path) -> None:
        self.models[repo] = {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}

    def bytes_of(self, suffix: str) -> int:
        """Body bytes sent for files whose name ends so."""
        return sum(asked.sent_bytes for asked in self.asked if asked.path.endswith(suffix))

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self._asked = Asked(
            method=self.command,
            path=path,
            range=self.headers.get("Range"),
            token=self.headers.get("Authorization"),
        )
        self.hub.asked.append(self._asked)
        while self.hub.stalls and path.endswith(self.hub.stalls):
            time.sleep(0.01)
        if self.hub.status is not None:
            self._send(self.hub.status, b"")
            return
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listing or file
        repo = found[1] if found else ""
        if repo not in self.hub.models or (
            self.hub.token is not None and self._asked.token != f"Bearer {self.hub.token}"
        ):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif found is not None and (found[2] or "main") not in {"main", COMMIT}:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif listing is not None:
            self._send(200, json.dumps(self._described(repo)).encode())
        elif file is not None:
            self._file(self.hub.models[repo], file[3])

    def _described(self, repo: str) -> dict[str, Any]:
        files = self.hub.models[repo].items()
        return {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": [
                {"rfilename": name, "size": len(content), "blobId": _git_sha1(content)}
                | ({"lfs": _lfs(content)} if name.endswith(SHARDS) else {})
                for name, content in files
            ],
        }

    def _file(self, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        content = files[name]
        shard = name.endswith(SHARDS)
        digest = hashlib.sha256(content).hexdigest() if shard else _git_sha1(content)
        headers = {
            "ETag": f'"{digest}"',
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self._asked.range or "")
        if ranged is None or self.hub.ignore_ranges:
            if shard and self.hub.flip and self.command == "GET":
                self.hub.flip -= 1
                content = content[:-5] + bytes([content[-5] ^ 2]) + content[-4:]
            self._send(200, content, headers, faulty=shard)
            return
        first, last = int(ranged[1]), int(ranged[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        body = content[first : last + 1]
        self._send(206, body, headers, faulty=shard and ranged[2] == "")

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, faulty: bool = False
    ) -> None:
        if faulty and self.hub.answers and (other := self.hub.answers.pop(0)) is not None:
            status, headers, body = other
            faulty = False
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if faulty and self.hub.unmeasured:
            self.close_connection = True
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if faulty and self.hub.cut_at:
            body = body[: self.hub.cut_at.pop(0)]
            self.close_connection = True
        self._asked.sent_bytes = len(body)  # before: the client may be done before we are
        with suppress(OSError):
            self.wfile.write(body)


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _lfs(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
