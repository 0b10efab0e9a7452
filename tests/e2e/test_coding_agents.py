"""Claude Code and Codex themselves finish a task over a gateway before a swarm of real peers.

Its model is small and can't act, so each answer is scripted: it has to follow a grammar that allows
one text. All else is as it is for any other model: template, sessions, stages, streams.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from client.answer.answer import AnswerRequest
from client.answer.defaults import defaults_of
from client.gateway.answering.answers import Answers
from client.gateway.answering.models import GatewayModels, OpenModel
from client.gateway.answering.service import CompletionService
from client.gateway.metrics import Metrics
from client.gateway.protocols.requests import ChatRequest, CompletionRequest
from client.gateway.structured.grammar import literal
from client.gateway.web.app import Gateway, GatewayConfig
from client.gateway.web.server import serving
from client.session.driver import SessionDriver
from client.swarm.swarm import Swarm
from client.text.chat_template import ChatTemplate
from dht.process.supervision import Supervisor
from testing.local_swarm import LocalSwarm
from tests.e2e.conftest import MODEL, start_swarm
from tests.templates import QWEN3
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.test_tool_answers import Scripted as Spelled

pytestmark = pytest.mark.e2e

CONTEXT_TOKENS = 16_384
LIMIT_S = 240.0
SECRET, DONE = "heron", "The word in the file is heron."
TASK = "Read note.txt and tell me the word in it."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with room for an agent's prompt, and a chat template with calls."""
    directory = tmp_path_factory.mktemp("models") / MODEL.name
    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": CONTEXT_TOKENS})
    )
    (directory / "chat_template.jinja").write_text(QWEN3)
    return directory


@pytest.fixture(scope="module")
def peers(model: Path) -> Iterator[LocalSwarm]:
    started = start_swarm((5.0, 5.0), model)  # of the least KV room; a prompt needs more
    yield started
    started.stop()


class Scripted(CompletionService):
    """Lets a model say one text alone: a call first, and the end once its result is there."""

    call = ""

    def _grammar(self, request: CompletionRequest | ChatRequest, prompt: str = "") -> str:
        assert isinstance(request, ChatRequest)
        results = [each for each in request.messages if each.role == "tool"]
        if any(SECRET in str(each.content) for each in results):
            return f"start: {literal(DONE)}"
        return f"start: {literal(self.call)}"


@asynccontextmanager
async def scripted_gateway(peers: LocalSwarm, model: Path, call: str) -> AsyncIterator[str]:
    """A gateway whose model makes this call; gets its address."""
    async with Swarm.connect(peers.addresses, model=str(model)) as swarm:
        metrics, config = Metrics(), GatewayConfig()
        answers = Answers(metrics, at_once_max=4, queued_max=16)
        template, defaults = ChatTemplate.load(model), defaults_of(model)
        service = Scripted(swarm, answers, template=template, defaults=defaults)
        service.call = call

        @asynccontextmanager
        async def opened(_: str) -> AsyncIterator[OpenModel]:
            yield OpenModel(swarm=swarm, service=service)

        models = GatewayModels((swarm.text.name,), opened)
        gateway = Gateway(models, answers, metrics, config, swarm)
        async with serving(gateway, Supervisor(), host="127.0.0.1", port=0, head_s=15) as port:
            yield f"http://127.0.0.1:{port}"
        await models.close()


@asynccontextmanager
async def made_up(call: str) -> AsyncIterator[str]:
    """The same over a swarm that is made up."""
    async with paper_gateway(template=QWEN3, context_tokens=CONTEXT_TOKENS) as gateway:
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None

        def session(request: AnswerRequest) -> SessionDriver:
            found = Spelled(gateway.swarm, request)
            found.text = DONE if SECRET in tokenizer.decode(request.prompt_ids) else call
            return found

        gateway.swarm.session = session  # type: ignore[method-assign]
        yield gateway.url


@pytest.fixture(params=["a made-up swarm", "real peers"])
def answering(request: pytest.FixtureRequest) -> Callable[[str], AbstractAsyncContextManager[str]]:
    """Makes the gateway whose model makes a call."""
    if request.param != "real peers":
        return made_up
    peers, model = request.getfixturevalue("peers"), request.getfixturevalue("model")
    return partial(scripted_gateway, peers, model)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (npm install --global; see docs/agents.md)")
    return found


async def run(command: list[str], directory: Path, environment: Mapping[str, str]) -> str:
    """What a program prints, run in a home of its own."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    work = directory / "work"
    work.mkdir()
    (work / "note.txt").write_text(f"{SECRET}\n")
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + err).decode(errors="replace")[-3000:]
    return out.decode()


def called(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_claude_code_finishes_a_task(
    answering: Callable[[str], AbstractAsyncContextManager[str]], tmp_path: Path
) -> None:
    claude = program("claude")
    reads = called("Read", {"file_path": str(tmp_path / "work" / "note.txt")})

    async def scenario() -> str:
        async with answering(reads) as url:
            # Without its long instructions: the rest of the protocol is the same. It asks for
            # 32,000 tokens first, more than there is room for, and for fewer once it was told.
            command = [
                claude,
                "-p",
                TASK,
                "--output-format",
                "json",
                "--system-prompt",
                "Be brief.",
            ]
            command += ["--tools", "Read", "--allowedTools", "Read", "--disable-slash-commands"]
            environment = {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": "brook",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "brook",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            }
            return await run(command, tmp_path, environment)

    told = json.loads(asyncio.run(scenario()))
    assert (told["result"], told["is_error"], told["num_turns"]) == (DONE, False, 2)


def test_codex_finishes_a_task(
    answering: Callable[[str], AbstractAsyncContextManager[str]], tmp_path: Path
) -> None:
    codex = program("codex")
    reads = called("exec_command", {"cmd": "cat note.txt"})

    async def scenario() -> str:
        async with answering(reads) as url:
            config = tmp_path / "codex"
            config.mkdir()
            (tmp_path / "instructions.md").write_text("Be brief.\n")
            (config / "config.toml").write_text(
                'model = "brook"\nmodel_provider = "anabranch"\n'
                "check_for_update_on_startup = false\n"
                f'model_instructions_file = "{tmp_path / "instructions.md"}"\n'
                '[analytics]\nenabled = false\n[model_providers.anabranch]\nname = "anabranch"\n'
                f'base_url = "{url}/v1"\nwire_api = "responses"\n'
            )
            command = [codex, "exec", "--json", "--skip-git-repo-check"]
            command += ["--dangerously-bypass-approvals-and-sandbox", TASK]
            return await run(command, tmp_path, {"CODEX_HOME": str(config)})

    items = [json.loads(line).get("item", {}) for line in asyncio.run(scenario()).splitlines()]
    ran = [each for each in items if each.get("type") == "command_execution"]
    assert ran[-1]["aggregated_output"] == f"{SECRET}\n"
    said = [each["text"] for each in items if each.get("type") == "agent_message"]
    assert said == [DONE]
