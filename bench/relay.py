"""A relay that does the least a transport daemon must: move bytes, and seal them on the way.

    python -m bench.relay seal|open PORT

Prints a port, takes one connection there and joins it to ``PORT``. Towards the other relay, bytes
travel in frames of at most 64 KiB under ChaCha20-Poly1305, as under libp2p's Noise: ``seal`` is the
side that connects to it, ``open`` the side that is connected to. The key is no secret: this
measures, it does not protect.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from bench.local_swarm import ROOT

KEY = bytes(32)
PIECE_BYTES = (64 << 10) - 32
LENGTH_BYTES, TAG_BYTES = 4, 16


@contextmanager
def relay(kind: str, port: int) -> Iterator[int]:
    """A relay in a process of its own in front of ``port``; yields its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.relay", kind, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def seal(source: socket.socket, target: socket.socket) -> None:
    """Plain bytes from ``source`` to sealed frames on ``target``."""
    cipher, number = ChaCha20Poly1305(KEY), 0
    while piece := source.recv(PIECE_BYTES):
        sealed = cipher.encrypt(number.to_bytes(12, "big"), piece, None)
        number += 1
        target.sendall(len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed)


def unseal(source: socket.socket, target: socket.socket) -> None:
    """Sealed frames from ``source`` to plain bytes on ``target``."""
    cipher, number = ChaCha20Poly1305(KEY), 0
    reader = source.makefile("rb", buffering=1 << 20)
    while length := reader.read(LENGTH_BYTES):
        sealed = reader.read(int.from_bytes(length, "big"))
        target.sendall(cipher.decrypt(number.to_bytes(12, "big"), sealed, None))
        number += 1


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        near, _ = server.accept()
    far = socket.create_connection(("127.0.0.1", port))
    for one in (near, far):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there, back = (seal, unseal) if kind == "seal" else (unseal, seal)
    threading.Thread(target=back, args=(far, near), daemon=True).start()
    there(near, far)


if __name__ == "__main__":
    main()
