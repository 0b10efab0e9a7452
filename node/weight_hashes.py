"""``python -m node.weight_hashes MODEL_DIR`` writes the hashes that peers check weights against."""

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from dht.checkpoints.gguf_model import model_directory
from dht.checkpoints.model_files import MANIFEST, read_config, read_manifest, shards_of
from dht.command_line import EXIT_DONE, Parser, command_of
from dht.errors import UserError
from dht.process.whole_file import write_whole
from node.weights.hashes import hash_shards
from node.weights.safetensors_header import DamagedError


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m node.weight_hashes",
        description="Write the SHA-256 of every tensor of a local model to its directory, so that"
        " peers find a damaged file before they serve it.",
        epilog="example: %(prog)s models/brook --check",
        exit_codes="0 done, 2 your mistake, or a file that is damaged",
    )
    parser.add_argument("model", metavar="MODEL_DIR", help="directory in Hugging Face layout")
    parser.add_argument(
        "--check", action="store_true", help="check all files against what was written before"
    )
    return parser.parse_args()


async def main(arguments: argparse.Namespace) -> int:
    """Hash, then write or compare."""
    return await asyncio.to_thread(_hash, Path(arguments.model), check=arguments.check)


def _hash(model: Path, *, check: bool) -> int:
    directory = model_directory(str(model))
    if directory is None:
        raise UserError(f"{model} is not a directory; give a model's directory or a GGUF file")
    read_config(directory)
    path = directory / MANIFEST
    known = read_manifest(path) if check else None
    if check and known is None:
        raise UserError(f"{path} is not there; write it first, without --check")
    manifest = hash_shards(directory, shards_of(directory))
    for name, hashes in manifest.shards.items():
        print(f"{hashes.sha256}  {name}", flush=True)
        if known is not None and known.shards.get(name) != hashes:
            raise DamagedError(name, f"{directory / name} is not what {MANIFEST} says")
    if known is not None:
        print(f"as {path} says")
    else:
        try:
            write_whole(path, msgspec.json.encode(manifest))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error}") from error
        print(f"wrote {path}")
    return EXIT_DONE


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
