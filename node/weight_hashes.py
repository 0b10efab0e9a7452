"""``python -m node.weight_hashes MODEL_DIR`` writes the hashes that peers check weights against."""

import argparse
import asyncio
import sys

import msgspec

from dht.command_line import EXIT_DONE, Parser, run_command
from dht.errors import UserError
from dht.whole_file import write_whole
from node.weights.hashes import MANIFEST, Manifest, ShardHashes, hash_shard, read_manifest
from node.weights.safetensors_header import DamagedError
from node.weights.store import WeightStore


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.weight_hashes",
        description="Write the SHA-256 of every tensor of a local model to its directory, so that"
        " peers find a damaged file before they serve it.",
        epilog="example: python -m node.weight_hashes models/brook --check"
        " | exit codes: 0 done, 2 your mistake, or a file that is damaged",
    )
    parser.add_argument("model", metavar="MODEL_DIR", help="directory in Hugging Face layout")
    parser.add_argument(
        "--check", action="store_true", help="check all files against what was written before"
    )
    return parser.parse_args()


async def main(arguments: argparse.Namespace) -> int:
    """Hash, then write or compare."""
    store = WeightStore.open(arguments.model)
    path = store.directory / MANIFEST
    known = read_manifest(path) if arguments.check else None
    if arguments.check and known is None:
        raise UserError(f"{path} is not there; write it first, without --check")
    shards: dict[str, ShardHashes] = {}
    for name in sorted({entry.shard for entry in store.tensors.values()}):
        try:
            shards[name] = await asyncio.to_thread(hash_shard, store.directory / name)
        except OSError as error:
            raise UserError(f"{store.directory / name} cannot be read: {error}") from error
        print(f"{shards[name].sha256}  {name}", flush=True)
        if known is not None and known.shards.get(name) != shards[name]:
            raise DamagedError(name, f"{store.directory / name} is not what {MANIFEST} says")
    if known is not None:
        print(f"as {path} says")
    else:
        try:
            write_whole(path, msgspec.json.encode(Manifest(shards=shards)))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error}") from error
        print(f"wrote {path}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(run_command(parse, main))
