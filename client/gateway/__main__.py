"""``python -m client.gateway``: OpenAI's interface in front of a swarm, until Ctrl-C."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from client.answer.defaults import FILE, SamplingDefaults, defaults_in, defaults_of
from client.answer.transformers_arguments import unheeded
from client.gateway.programs import PROGRAMS, settings, settings_for
from client.gateway.protocols.requests import CHAT_TOKENS_DEFAULT
from client.gateway.web.callers import check_hosts, hosts_of, origin_of, proxies_of
from client.gateway.web.uploads import UploadsConfig
from client.remembering import lasting_swarm, remember_swarm
from client.swarm.swarm import Swarm, model_beside, named_of
from client.text.chat_template import ChatTemplate
from coordinator.problem.model_pin import DIGITS_MIN
from dht.checkpoints.hub import typed_model
from dht.command_line import EXIT_DONE, Parser, command_of, flag_of, on_interrupt
from dht.errors import UserError, reason_of
from dht.process.json_file import object_or_empty
from dht.process.lasting_stream import LastingStream
from dht.process.secret_file import check_private
from dht.process.supervision import first_of
from dht.swarm_options import add_model, add_swarm, settle_swarm

if TYPE_CHECKING:
    from client.gateway.answering.models import OpenModel
    from client.gateway.answering.service import CompletionService
    from client.gateway.keys import Key

KEYS_VARIABLE = "ANABRANCH_API_KEYS"
PUBLIC = """\
to announce this network to everybody:
  1. its founder's port must be open to the internet (`anabranch doctor` there);
  2. on the founder's machine, while no peer runs there, sign an entry for the list:
       anabranch networks --announce --contact https://example.org/about
  3. add it to client/networks.toml by a pull request (docs/public-page.md);
  4. for this interface: a web server with TLS before it, and keys (--api-key-file).
Say to everybody that peers can read the prompts that they serve."""


def parse() -> argparse.Namespace:
    """The command's arguments; raises UserError."""
    parser = Parser(
        prog="python -m client.gateway",
        usage="%(prog)s [anabranch:…] [--model M] [options]",
        description="Serve OpenAI's HTTP interface in front of a swarm, until Ctrl-C.",
        epilog="example: %(prog)s anabranch:…",
        exit_codes="0 stopped, 1 it failed, 2 your mistake, 3 no swarm",
    )
    add_swarm(parser)
    add_model(parser)
    parser.add_argument(
        "--models",
        type=typed_model,
        nargs="+",
        default=[],
        metavar="M",
        help="these, too: as --model, or NAME=FINGERPRINT",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="listen here (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="0 takes any (8000)")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"ask for keys: one a line, or .toml with quotas; or {KEYS_VARIABLE}=KEY,KEY",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="let web pages from here call (CORS; default: none)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this name, too, without keys on this machine alone",
    )
    parser.add_argument(
        "--for",
        dest="program",
        choices=tuple(PROGRAMS),
        help="print what this program needs to ask here",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait for a turn, slow peers and missing layers before a 503 (30)",
    )
    parser.add_argument(
        "--drain", type=float, default=30.0, metavar="S", help="for answers after Ctrl-C (30)"
    )
    parser.add_argument(
        "--max-body", type=float, default=8.0, metavar="MIB", help="largest request body (8)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=256, metavar="N", help="at once; then 429 (256)"
    )
    parser.add_argument(
        "--log-requests",
        action="store_true",
        help="a line per request on stderr: key, tokens, seconds; nothing of its text",
    )
    parser.add_rare(
        "--public", action="store_true", help="say what is needed to announce it to everybody"
    )
    parser.add_rare(
        "--chat-tokens",
        type=int,
        default=CHAT_TOKENS_DEFAULT,
        metavar="N",
        help="for a chat's answer that asks for no number (what context, key and peers have)",
    )
    parser.add_rare(
        "--proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a web server before this one, believed who asks: X-Forwarded-For and -Host",
    )
    parser.add_rare("--request-log", metavar="FILE", help="append these lines to it instead")
    arguments = parser.parse_args()
    settle_swarm(arguments, model="")
    return arguments


def check(arguments: argparse.Namespace) -> tuple["Key", ...]:
    """The keys to ask for; raises UserError for arguments that cannot be.

    They come from a file or the environment: everybody on a machine sees its command lines.
    """
    from client.gateway.keys import check_distinct, named_keys, plain_keys

    for name, low, high in (
        ("port", 0, 65_535),
        ("wait", 0, 3_600),
        ("drain", 0, 3_600),
        ("max_body", 0.001, 1_024),
        ("max_requests", 1, 100_000),
        ("chat_tokens", 1, 1 << 22),
    ):
        value = getattr(arguments, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"{flag_of(name)} is {value}; it must be between {low} and {high}")
    check_hosts(arguments.allow_host)
    said = os.environ.get(KEYS_VARIABLE, "")
    texts = said.split(",")
    named: tuple[Key, ...] = ()
    if arguments.api_key_file is not None:
        file = Path(arguments.api_key_file)
        try:
            read = _read_secret(file)
            if file.suffix == ".toml":
                named = named_keys(read)
            else:
                texts += read.splitlines()
        except (OSError, ValueError, UserError) as error:
            raise UserError(f"--api-key-file {file}: {reason_of(error)}") from None
    keys = (*plain_keys(texts), *named)
    if said and not keys:
        raise UserError(f"{KEYS_VARIABLE} has no key in it: unset it, or give KEY,KEY")
    check_distinct(keys)
    if arguments.api_key_file is not None and not keys:
        raise UserError(f"--api-key-file {arguments.api_key_file} has no key in it")
    return keys


def _read_secret(file: Path) -> str:
    from client.gateway.keys import KEYS

    check_private(file, "the file")
    with file.open("rb") as opened:
        read = opened.read(KEYS.file_bytes_max + 1)
    if len(read) > KEYS.file_bytes_max:
        raise UserError(f"it has more than {KEYS.file_bytes_max} bytes")
    return read.decode("utf-8")


@contextmanager
def logged(arguments: argparse.Namespace) -> Iterator[None]:
    """Write a line per request where the arguments ask for it; raises UserError."""
    from client.gateway.web.app import requests

    if not arguments.log_requests and arguments.request_log is None:
        yield
        return
    requests.setLevel(logging.INFO)
    if arguments.request_log is None:
        yield
        return
    try:
        handler = WatchedFileHandler(arguments.request_log, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--request-log {arguments.request_log}: {reason_of(error)}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests.addHandler(handler)
    requests.propagate = False
    try:
        yield
    finally:
        requests.removeHandler(handler)
        requests.propagate = True
        handler.close()


async def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    with logged(arguments):
        return await serve(arguments)


async def serve(arguments: argparse.Namespace) -> int:
    """Connect, serve until a signal comes, let the last answers end."""
    from client.gateway.answering.answers import Answers
    from client.gateway.answering.models import GatewayModels, OpenModel
    from client.gateway.answering.service import CompletionService
    from client.gateway.metrics import Metrics
    from client.gateway.web.app import Gateway, GatewayConfig
    from client.gateway.web.server import drain, serving
    from dht.grammars.trials import GrammarTrials

    config = GatewayConfig(
        keys=check(arguments),
        origins=tuple(map(origin_of, arguments.allow_origin)),
        hosts=hosts_of(arguments.host, arguments.allow_host),
        proxies=proxies_of(arguments.proxy),
        uploads=UploadsConfig(bytes_max=int(arguments.max_body * 2**20)),
        requests_max=arguments.max_requests,
    )
    async with lasting_swarm(arguments, _say, wait_s=arguments.wait, pings_always=True) as swarm:
        if (spec := swarm.view.spec) is not None and swarm.is_vouched_for(spec):
            remember_swarm(arguments, swarm)
        parts = swarm.reader.parts
        metrics = Metrics()
        metrics.registry.register(parts)
        answers = Answers(
            metrics,
            at_once_max=config.answers_at_once_max,
            queued_max=config.requests_max,
            wait_s=arguments.wait,
        )
        await take_text(swarm)
        others = {named_of(entry): entry for entry in arguments.models}
        others.pop(swarm.text.name, None)
        trials = GrammarTrials()

        def service_of(swarm: Swarm) -> CompletionService:
            template, defaults = _text_side(swarm.text.directory)
            return CompletionService(
                swarm,
                answers,
                template=template,
                defaults=defaults,
                chat_tokens=arguments.chat_tokens,
                trials=trials,
            )

        @asynccontextmanager
        async def opened(name: str) -> AsyncIterator[OpenModel]:
            if name == swarm.text.name:
                yield opened_as(swarm, service_of)
                return
            async with model_beside(swarm, others[name], _say) as other:
                await take_text(other)
                yield opened_as(other, service_of)

        models = GatewayModels((swarm.text.name, *others), opened)
        async with models.use(swarm.text.name):
            pass  # it is listed with its context from the start
        gateway = Gateway(models, answers, metrics, config, swarm)
        interrupts: asyncio.Queue[None] = asyncio.Queue()
        with on_interrupt(lambda: interrupts.put_nowait(None)):
            async with serving(
                gateway, parts, host=arguments.host, port=arguments.port, head_s=config.head_s
            ) as port:
                host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
                url = f"http://{host}:{port}/v1"
                names = (swarm.text.name, *others)
                for text in _how_to_ask(arguments, url, names, with_keys=bool(config.keys)):
                    print(text, file=LastingStream(sys.stdout), flush=True)
                await interrupts.get()
                if answers.requests:
                    _say(f"requests being finished: {answers.requests} (Ctrl-C ends them)")
                await first_of(drain(gateway, answers, arguments.drain), interrupts.get())
        await models.close()
    return EXIT_DONE


def _how_to_ask(
    arguments: argparse.Namespace, url: str, names: tuple[str, ...], *, with_keys: bool
) -> Iterator[str]:
    """What to tell the owner of a gateway at ``url`` that serves these models."""
    yield f"serving {', '.join(names)} at {url} (Ctrl-C stops)"
    yield f"chat in a browser at {url.removesuffix('v1')}"
    if arguments.public:
        yield PUBLIC
    yield f"in other programs:\n{settings(url, names[0], with_keys=with_keys)}"
    if arguments.program is not None:
        told = settings_for(arguments.program, url, names[0], with_keys=with_keys)
        yield f"for {arguments.program}:\n\n{told}\n"


def opened_as(swarm: Swarm, serve: Callable[[Swarm], "CompletionService"]) -> "OpenModel":
    """A model with what is here of it. What its peers have may come later: in a gateway that was
    started before them."""
    from client.gateway.answering.models import OpenModel

    async def whole() -> OpenModel | None:
        await swarm.reader.ready_spec()
        await take_text(swarm)
        return None if swarm.text.directory is None else opened_as(swarm, serve)

    is_whole = swarm.text.directory is not None
    return OpenModel(swarm=swarm, service=serve(swarm), whole=None if is_whole else whole)


async def take_text(swarm: Swarm) -> None:
    """Take a model's text files from its peers, if they are those that the owner means.

    A stranger's chat template could go on for ever, and so could a stranger's tokenizer.
    """
    if swarm.text.directory is not None:
        return
    spec = swarm.view.spec
    if spec is None:
        others = await swarm.reader.other_models()
        _say(
            f"nobody in network {swarm.config.network} announces {swarm.text.name} now"
            + f"; {others or 'requests wait until somebody does'}"
        )
    elif swarm.is_vouched_for(spec):
        await swarm.ready_text()
    else:
        _say(
            f"{swarm.text.name} takes token ids only: a stranger's tokenizer and template are not"
            f" run here; --models {swarm.text.name}={spec.fingerprint[:DIGITS_MIN]} vouches for it"
        )


def _text_side(directory: Path | None) -> tuple[ChatTemplate | None, SamplingDefaults]:
    """Chat template and default sampling from the model's files."""
    if directory is None:
        return None, defaults_in({})
    for name, value in unheeded(object_or_empty(directory / FILE)).items():
        _say(f"{directory / FILE} says {name} {str(value)[:60]}, which answers do not follow here")
    return ChatTemplate.load(directory), defaults_of(directory)


def _say(text: str) -> None:
    print(text, file=LastingStream(sys.stderr), flush=True)


run = command_of(parse, main)

if __name__ == "__main__":
    sys.exit(run())
