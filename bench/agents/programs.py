"""Claude Code and Codex themselves, run for a task, for an answer in a format, and for what is too
long."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.agents.families import CALLS, ONE_CALL, behind, calls, says, thinks
from bench.agents.said import FORMAT
from client.answer.answer import AnswerRequest
from client.session.driver import SessionDriver
from tests.templates import TEMPLATES
from tests.unit.client.gateway.paper import PaperGateway, paper_gateway
from tests.unit.client.gateway.test_tool_answers import Scripted

CONTEXT_TOKENS = 32_768
LIMIT_S = 300.0
TASK, SYSTEM, SECRET, DONE = "Read the notes.", "Be brief as ever.", "heron", "It says heron."
LONG = " a long way" * 3000
TOO_LONG = " a long way" * 11_000
"""Just below what one argument of a command may have (128 KiB)."""
NOTES = 5
"""Three are read one after the other, and the rest at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a program printed and recorded, and what it asked the gateway for."""

    events: list[dict[str, Any]]
    printed: str
    asked: list[AnswerRequest]


Command = Callable[[str, Path, str, str], tuple[list[str], dict[str, str]]]
"""Of the gateway's address, an empty directory, the task, and the JSON schema of the answer or
nothing: what to run and its environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How a program is run, and how what it prints is read."""

    title: str
    file: str
    command: Command
    reads: Callable[[str], tuple[str, Mapping[str, str]]]
    """The call that reads a file."""
    said: Callable[[list[dict[str, Any]]], str]
    """The last text of the model that it shows."""
    thought: Callable[[list[dict[str, Any]]], str]
    forms: Callable[[str, Mapping[str, str]], str]
    """How a model of this family answers in a format."""
    formed: Callable[[list[dict[str, Any]]], list[str]]
    """What it shows of that, as JSON."""
    record: str = ""
    """Where in its home it records what it read, if it does not print all of it: a pattern."""


def _claude(url: str, home: Path, task: str, schema: str) -> tuple[list[str], dict[str, str]]:
    options = ["--output-format", "stream-json", "--verbose", "--system-prompt", SYSTEM]
    options += ["--tools", "Read", "--allowedTools", "Read", "--disable-slash-commands"]
    options += ["--json-schema", schema] if schema else []
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "brook",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "brook",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
        "DISABLE_AUTOUPDATER": "1",
    }
    return ["claude", "-p", task, *options], environment


def _codex(url: str, home: Path, task: str, schema: str) -> tuple[list[str], dict[str, str]]:
    (home / "instructions.md").write_text(SYSTEM)
    (home / "schema.json").write_text(schema)
    (home / "config.toml").write_text(
        'model = "brook"\nmodel_provider = "anabranch"\ncheck_for_update_on_startup = false\n'
        f'model_instructions_file = "{home / "instructions.md"}"\n'
        '[analytics]\nenabled = false\n[model_providers.anabranch]\nname = "anabranch"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nstream_max_retries = 0\n'
    )
    command = ["codex", "exec", "--json", "--skip-git-repo-check"]
    command += ["--output-schema", str(home / "schema.json")] if schema else []
    return [*command, "--dangerously-bypass-approvals-and-sandbox", task], {"CODEX_HOME": str(home)}


def _blocks(events: list[dict[str, Any]], kind: str) -> list[str]:
    """Texts of one kind in what Claude Code shows of the model's messages."""
    messages = (each["message"] for each in events if each.get("type") == "assistant")
    return [block[kind] for each in messages for block in each["content"] if block["type"] == kind]


def _messages(events: list[dict[str, Any]]) -> list[str]:
    """The model's messages in what Codex shows."""
    items = (each["item"] for each in events if each.get("type") == "item.completed")
    return [item["text"] for item in items if item["type"] == "agent_message"]


def _recorded_thoughts(events: list[dict[str, Any]]) -> list[str]:
    """Thoughts in what Codex records of a session; ``codex exec`` prints only their summaries."""
    items = (each["payload"] for each in events if each.get("type") == "response_item")
    thoughts = (item for item in items if item["type"] == "reasoning")
    return [part["text"] for item in thoughts for part in item["content"] or ()]


PROGRAMS = (
    Program(
        title="Claude Code",
        file="claude",
        command=_claude,
        reads=lambda path: ("Read", {"file_path": path}),
        said=lambda events: "".join(_blocks(events, "text")[-1:]),
        thought=lambda events: "".join(_blocks(events, "thinking")[:1]),
        forms=lambda family, value: calls(family, ("StructuredOutput", value)),
        formed=lambda events: [json.dumps(each.get("structured_output")) for each in events],
    ),
    Program(
        title="Codex",
        file="codex",
        command=_codex,
        reads=lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        said=lambda events: "".join(_messages(events)[-1:]),
        thought=lambda events: "".join(_recorded_thoughts(events)[:1]),
        forms=lambda family, value: says(family, json.dumps(value)),
        formed=_messages,
        record="sessions/**/*.jsonl",
    ),
)


async def version_of(program: Program, path: str) -> str | None:
    """The program's name with its version; None where it is not there."""
    found = shutil.which(program.file, path=path)
    if found is None:
        return None
    process = await asyncio.create_subprocess_exec(
        found, "--version", stdout=asyncio.subprocess.PIPE, env={"PATH": path, "HOME": "/nowhere"}
    )
    said, _ = await process.communicate()
    number = next((word for word in said.decode().split() if word[:1].isdigit()), "?")
    return f"{program.title} {number}"


async def _run(
    program: Program, path: str, gateway: PaperGateway, task: str, answer: Callable[[str], str],
    work: Path, schema: str = "",
) -> Run:  # fmt: skip
    """Run a program whose model answers each prompt with ``answer``."""
    tokenizer = gateway.swarm.text.tokenizer
    assert tokenizer is not None
    asked: list[AnswerRequest] = []

    def session(request: AnswerRequest) -> SessionDriver:
        asked.append(request)
        found = Scripted(gateway.swarm, request)
        found.text = answer(tokenizer.decode(request.prompt_ids))
        return found

    gateway.swarm.session = session  # type: ignore[method-assign]
    with TemporaryDirectory() as home:
        command, environment = program.command(gateway.url, Path(home), task, schema)
        command[0] = shutil.which(command[0], path=path) or command[0]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env={"PATH": path, "HOME": home, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 24,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        printed = said.decode(errors="replace")
        lines = [*printed.splitlines(), *_recorded(Path(home), program.record)]
    return Run([json.loads(line) for line in lines if line.startswith("{")], printed, asked)


def _recorded(home: Path, pattern: str) -> list[str]:
    """The lines of the files of this pattern; an empty one has none."""
    files = home.glob(pattern) if pattern else ()
    return [line for file in files for line in file.read_text().splitlines()]


def _judged(ok: bool, run: Run) -> str:
    return "ok" if ok else f"got {run.printed[-600:]}"


async def cell(program: Program, path: str, family: str) -> dict[str, str]:
    """What became of each thing that was tried with a family's template."""
    try:
        return await _cell(program, path, family)
    except Exception as error:  # noqa: BLE001  it is this cell's result
        return {"chat": f"{type(error).__name__}: {error}"[:300]}


async def _cell(program: Program, path: str, family: str) -> dict[str, str]:
    can_call = family in CALLS
    with TemporaryDirectory() as directory:
        work = Path(directory)
        for at in range(NOTES):
            (work / f"note{at}.txt").write_text(f"{SECRET}-{at}\n")
        reads = [program.reads(str(work / f"note{at}.txt")) for at in range(NOTES)]
        thoughts = thinks(family, "hm")

        def answer(prompt: str) -> str:
            at = next((at for at in range(NOTES) if f"{SECRET}-{at}" not in prompt), NOTES)
            if at == NOTES:
                return behind(prompt, says(family, DONE))
            last = NOTES if at >= 3 and family not in ONE_CALL else at + 1
            made = calls(family, *reads[at:last])
            # Later calls may stand within thoughts that never end: models make such ones, too.
            return made if at or thoughts is None else behind(prompt, thoughts + made)

        template = TEMPLATES[family]
        async with paper_gateway(template=template, context_tokens=CONTEXT_TOKENS) as gateway:
            run = await _run(program, path, gateway, TASK + LONG, answer, work)
            if not can_call:
                named = "no way to call" in run.printed
                return {"chat": "refused" if named else f"got {run.printed[-600:]}"}
            tokenizer = gateway.swarm.text.tokenizer
            assert tokenizer is not None
            asked = run.asked[-1].prompt_ids if run.asked else ()
            prompt = tokenizer.decode(asked)
            told = [f"note{at}.txt" in prompt and f"{SECRET}-{at}" in prompt for at in range(NOTES)]
            found = {
                "chat": _judged(program.said(run.events) == DONE, run),
                "system and developer messages": _judged(SYSTEM in prompt and TASK in prompt, run),
                "a loop of three calls": _judged(all(told[:3]), run),
                "parallel calls": _judged(all(told[3:]), run),
                "a long prompt": _judged(LONG in prompt, run),
            }
            if thoughts is None:
                found["thinking"] = "none"
            else:
                found["thinking"] = _judged(program.thought(run.events) == "hm", run)
            found["structured output"] = await _structured(program, path, gateway, work, family)
            found["overflow"] = await _overflow(program, path, gateway, work)
            return found


async def _structured(
    program: Program, path: str, gateway: PaperGateway, work: Path, family: str
) -> str:
    value, schema = {"at": "x"}, json.dumps(FORMAT["schema"])
    said = program.forms(family, value)
    run = await _run(
        program, path, gateway, TASK, lambda prompt: behind(prompt, said), work, schema
    )
    return _judged(json.dumps(value) in program.formed(run.events), run)


async def _overflow(program: Program, path: str, gateway: PaperGateway, work: Path) -> str:
    run = await _run(program, path, gateway, TASK + TOO_LONG, lambda _: "no", work)
    known = ("Prompt is too long", "prompt is too long", "context window", "maximum context length")
    return _judged(any(words in run.printed for words in known) and not run.asked, run)


def path_of(prefix: Path) -> str:
    """Where programs are looked for: in ``prefix`` (absolute), then on the path."""
    return os.pathsep.join((str(prefix / "node_modules" / ".bin"), os.environ["PATH"]))
