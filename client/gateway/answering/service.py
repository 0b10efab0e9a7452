"""What the gateway does for each kind of request, between its schema and the swarm."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from client.answer.defaults import SamplingDefaults
from client.answer.generation import GenerationOptions
from client.gateway.answering.answers import (
    Answers,
    ChoicePart,
    ChoiceTask,
    as_api_error,
)
from client.gateway.answering.choices import ChoiceWriter
from client.gateway.answering.job import Job
from client.gateway.answering.text_threads import TextThreads
from client.gateway.errors import TooLong, bad_request, beyond_context, too_many
from client.gateway.protocols.answer_bodies import (
    ChunkHead,
    Usage,
    finish_of,
    route_body,
)
from client.gateway.protocols.formats import format_grammar, is_free, tools_grammar, wants_format
from client.gateway.protocols.messages import Function
from client.gateway.protocols.requests import (
    CHAT_TOKENS_DEFAULT,
    REQUEST,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    check_stops,
    check_supported,
    mistake_in,
    open_tokens,
    prompts_of,
    request_options,
    seeded,
    size_of,
    wanted_tokens,
    with_allowed_tools,
)
from client.gateway.protocols.tool_names import with_shown_names
from client.gateway.structured.answer_reader import reads
from client.gateway.structured.call_formats import call_format
from client.gateway.structured.calls import Call
from client.gateway.structured.channels import channels_of
from client.swarm.swarm import Swarm
from client.text.arrangement import Arguments, LeftOut, arranged
from client.text.chat_template import ChatTemplate
from client.text.tokenizer import Tokenizer
from dht.errors import NetworkError, SwarmError, UserError
from dht.grammars.trials import GrammarTrials, TrialsBusyError
from dht.messages.logprobs import SCORED_VALUES_MAX, scored_values
from dht.process.json_file import Json

FAULT_CHARS_MAX = 400
"""Characters of what is said to be wrong with a grammar: the library shows the grammar, too."""
A_TOOL = Function(name="weather", parameters={"type": "object", "properties": {"at": {}}})
A_CALL = {"name": A_TOOL.name, "arguments": Arguments({"at": "sea"})}
"""What a chat template is tried with."""


class CompletionService:
    """Understands requests and writes answers. ``created`` is Unix time in whole seconds."""

    def __init__(
        self,
        swarm: Swarm,
        answers: Answers,
        *,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        chat_tokens: int | None = CHAT_TOKENS_DEFAULT,
        trials: GrammarTrials | None = None,
    ) -> None:
        """``trials`` tries the grammars of all models of a gateway; None: of this one alone."""
        self._trials = trials or GrammarTrials()
        self._swarm = swarm
        self._answers = answers
        self._template = template
        self._defaults = defaults
        self._chat_tokens = chat_tokens
        self._threads = TextThreads()
        tokenizer = swarm.text.tokenizer
        source = "" if template is None else template.source
        tool_source = "" if template is None else template.tool_source
        written = "" if template is None else template.written_call(A_CALL, A_TOOL.as_dict())
        self._channels = channels_of(source) or channels_of(tool_source)
        call = Call(name=A_TOOL.name, arguments=str(A_CALL["arguments"]))
        self._calls = call_format(
            tool_source,
            written,
            (lambda form: reads(form, self._channels, written, call))
            if A_TOOL.name in written
            else None,
        )
        known = (each.marks for each in (self._calls, self._channels) if each is not None)
        marks = frozenset[str]().union(*known)
        self._marks: dict[str, str] = {}
        if tokenizer is not None and template is not None:
            special = tokenizer.mark_tokens(marks)
            self._marks = {mark: f"<[{token_id}]>" for mark, token_id in special.items()}
            # What ends an answer is none of its text.
            ends = swarm.text.stop_token_ids
            if shown := [mark for mark, token_id in special.items() if token_id not in ends]:
                swarm.text = replace(swarm.text, tokenizer=tokenizer.showing(shown))
        self._characters_per_token = None if tokenizer is None else tokenizer.characters_per_token()

    @property
    def template(self) -> str:
        """The model's chat template; empty: it has none."""
        return "" if self._template is None else self._template.source

    @property
    def calls_functions(self) -> bool:
        """Whether the model's calls of functions can be read."""
        return self._calls is not None

    @property
    def thinks(self) -> bool:
        """Whether the model's thoughts can be told from its text."""
        return self._channels is not None

    # Understanding

    async def understand(
        self,
        request: CompletionRequest | ChatRequest,
        caller: str,
        *,
        who: str = "",
        tokens_left: int | None = None,
    ) -> Job:
        """What to run for ``request``; raises ApiError.

        Requests of different ``caller`` share no KV, unless they ask for it. ``tokens_left`` bounds
        prompts and answers that ask for no number of tokens; None: it does not.
        """
        names: Mapping[str, str] = {}
        check_supported(request)
        if isinstance(request, ChatRequest):
            request, names = with_shown_names(with_allowed_tools(request))
        check_stops((request.stop,) if isinstance(request.stop, str) else request.stop or ())
        context = await self._context()
        prompts, texts = await self._threads.run(
            size_of(request), lambda: self._prompts(request, context), who
        )
        n = request.n or 1
        is_chat = isinstance(request, ChatRequest)
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        wanted = wanted_tokens(request)
        if wanted == 0 and not echo:
            name = (
                "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
            )
            raise bad_request(f"{name} is 0; at least 1" + ", or 0 with echo" * (not is_chat), name)
        grammar = await self._threads.run(
            size_of(request), lambda: self._grammar(request, texts[0] if texts else ""), who
        )
        await self._check(grammar, who)
        told = (request.stream and request.stream_options) or StreamOptions()
        tasks = []
        if wanted is None and tokens_left is not None:
            tokens_left = (tokens_left - sum(map(len, prompts))) // (n * len(prompts))
        new = [self._new_tokens(request, p, wanted, context, tokens_left) for p in prompts]
        # Once for all prompts: a request may have hundreds of these, and a thousand biases.
        asked = request_options(request, self._defaults, min(new), grammar)
        asked = asked.but(cache_salt=f"{caller}\n{asked.cache_salt}")
        _check_scores(asked.prompt_logprobs, [len(prompt_ids) for prompt_ids in prompts], n)
        for at, prompt_ids in enumerate(prompts):
            options = asked.but(max_new_tokens=new[at])
            self._check_options(request, options, prompt_ids, context)
            tasks += [
                ChoiceTask(
                    index=at * n + choice,
                    prompt_ids=prompt_ids,
                    options=seeded(options, choice),
                    tells_route=told.include_route is True,
                    continues=not isinstance(request, ChatRequest) or request.continues,
                )
                for choice in range(n)
            ]
        return Job(
            head=self._head(is_chat, bool(request.stream)),
            tasks=tasks,
            usage=Usage(prompt_tokens=sum(len(prompt_ids) for prompt_ids in prompts)),
            choices=n,
            streams=bool(request.stream),
            include_usage=told.include_usage is True,
            is_chat=is_chat,
            logprobs_top=tasks[0].options.logprobs,
            echo=echo,
            keeps_answer=wanted != 0,
            who=who,
            names=names,
            prompt_texts=[texts[task.index // n] for task in tasks] if echo else [],
            **self._reading(request, texts[0], grammar) if isinstance(request, ChatRequest) else {},
        )

    def _reading(self, request: ChatRequest, prompt: str, grammar: str) -> Json:
        """How the answers are read. One that has to be a call or in a format has no thoughts, but
        it may have messages with heads."""
        calls, channels = self._calls if request.offered else None, self._channels
        heads = channels is not None and channels.says
        is_bare = not heads or (wants_format(request) and not request.offered)
        if grammar and not is_free(request) and is_bare:
            channels = None
        return {
            "calls": calls,
            "one_call": request.parallel_tool_calls is False,
            "tells_thoughts": request.tells_thoughts,
            "parameters": request.parameters,
            "channels": channels,
            "opened": None if channels is None else channels.opened_by(prompt),
        }

    async def count(self, request: ChatRequest, who: str = "") -> int:
        """The number of tokens of the prompt that ``request`` of ``who`` makes; raises ApiError."""
        check_supported(request)
        request, _ = with_shown_names(with_allowed_tools(request))
        await self._threads.run(size_of(request), lambda: self._grammar(request), who)
        context = await self._context()
        (prompt_ids,), _ = await self._threads.run(
            size_of(request), lambda: self._prompts(request, context), who
        )
        return len(prompt_ids)

    async def _context(self) -> int:
        """Tokens that the model's context takes; raises ApiError where nobody tells."""
        try:
            return (await self._swarm.reader.ready_spec()).context_tokens
        except (SwarmError, NetworkError) as error:
            raise as_api_error(error) from None

    def _grammar(self, request: CompletionRequest | ChatRequest, prompt: str = "") -> str:
        """The grammar that the answers to ``prompt`` follow; empty: none. Raises ApiError (400).

        In a thread: a schema may be large, and refer to itself.
        """
        wanted = format_grammar(request)
        if not isinstance(request, ChatRequest):
            return wanted
        channels = self._channels
        opened = channels is not None and channels.opened_by(prompt) is not None
        calls = tools_grammar(request, self._calls, channels, self._marks, wanted, opened=opened)
        return calls or wanted

    async def _check(self, grammar: str, who: str) -> None:
        """Find out, as the last stage does, whether answers can follow this; raises ApiError.

        ``who`` asks, for the turns of trials."""
        if not grammar:
            return
        try:
            fault = await self._trials.fault(who, grammar.encode())
        except UnicodeEncodeError:
            raise bad_request("the format of the answer is not valid UTF-8 text") from None
        except TrialsBusyError as error:
            raise too_many(str(error)) from None
        if fault:
            reason = " ".join(fault.split())[:FAULT_CHARS_MAX]
            raise bad_request(f"the format of the answer cannot be followed: {reason}")

    def _head(self, is_chat: bool, streams: bool) -> ChunkHead:
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if streams else "chat.completion"
        return ChunkHead(
            id=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            object=kind,
            created=int(time.time()),
            model=self._swarm.text.name,
        )

    def _prompts(
        self, request: CompletionRequest | ChatRequest, context: int
    ) -> tuple[list[tuple[int, ...]], list[str]]:
        """Token ids of each prompt, and its text where that is there or echoed.

        In a thread: templates and tokenizers take seconds for what a request may bring.
        """
        if isinstance(request, ChatRequest):
            text = self._render(request)
            ids = self._encode(text, "messages", bool(request.add_special_tokens), context)
            return [ids], [text]
        prompts = prompts_of(request)
        n = request.n or 1
        if len(prompts) * n > REQUEST.answers_max:
            raise bad_request(
                f"{len(prompts)} prompts with n {n} are {len(prompts) * n} answers;"
                f" {REQUEST.answers_max} at most",
                "n",
            )
        special = request.add_special_tokens is not False
        echo = request.echo and self._swarm.text.tokenizer is not None
        encoded, texts = [], []
        for prompt in prompts:
            if isinstance(prompt, str):
                encoded.append(self._encode(prompt, "prompt", special, context))
                texts.append(prompt)
            else:
                encoded.append(prompt)
                # Of a prompt that is too long, nothing is echoed: it is refused, by its length.
                texts.append(self._decode(prompt) if echo and len(prompt) < context else "")
        return encoded, texts

    def _tokenizer(self, param: str) -> Tokenizer:
        if self._swarm.text.tokenizer is None:
            raise bad_request(
                f"this gateway was started without {self._swarm.text.name}'s tokenizer: send"
                " token ids to /v1/completions",
                param,
            )
        return self._swarm.text.tokenizer

    def _encode(self, text: str, param: str, special_tokens: bool, context: int) -> tuple[int, ...]:
        tokenizer = self._tokenizer(param)
        each = self._characters_per_token
        if each is not None and len(text) > each * context:
            least = TooLong(context=context, prompt=-(-len(text) // each), is_whole=False)
            raise beyond_context(least, param)
        try:
            return tokenizer.encode(text, special_tokens=special_tokens)
        except UserError as error:
            raise bad_request(str(error), param) from None

    def _decode(self, prompt: Sequence[int]) -> str:
        """Text of a prompt that came as ids; ids that cannot be are refused later, by name."""
        vocab = self._swarm.view.spec.vocab if self._swarm.view.spec is not None else 0
        return self._tokenizer("prompt").decode([each for each in prompt if 0 <= each < vocab])

    def _render(self, request: ChatRequest) -> str:
        if self._template is None:
            raise bad_request(
                f"{self._swarm.text.name} has no chat template: it is no chat model; use"
                " /v1/completions",
                "messages",
                "no_chat_template",
            )
        continued = request.continues
        until_s = time.thread_time() + REQUEST.template_s
        shown: dict[str, Any] = {
            "add_generation_prompt": request.add_generation_prompt is not False and not continued,
            "tools": [tool.function.as_dict() for tool in request.offered] or None,
            "options": request.template_options(self._template.source),
            "late": lambda: time.thread_time() > until_s,
        }
        try:
            messages = arranged(
                self._template, [message.as_dict() for message in request.messages], **shown
            )
            text = self._template.render(messages, continue_final_message=continued, **shown)
        except LeftOut as error:
            raise bad_request(str(error), f"messages[{error.at}]") from None
        except UserError as error:
            raise bad_request(str(error), "messages") from None
        channels = self._channels
        only_format = wants_format(request) and not request.offered
        if channels is not None and channels.says and only_format:
            # The format is that of the text, so the head of its message is the prompt's.
            text += channels.says_at_once if text.endswith(channels.prompt_ends) else ""
        if channels is not None and not is_free(request) and channels.opened_by(text) == "":
            # A call or a format is demanded of the answer, not of thoughts: these end at once.
            text += f"\n{channels.closes[0]}\n\n"
        return text

    def _new_tokens(
        self,
        request: CompletionRequest | ChatRequest,
        prompt_ids: Sequence[int],
        wanted: int | None,
        context: int,
        left: int | None,
    ) -> int:
        """How many new tokens an answer may have; raises ApiError (400)."""
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        room = context - len(prompt_ids)
        if room < 1:
            raise beyond_context(TooLong(context=context, prompt=len(prompt_ids)), param)
        if wanted is not None and wanted > room:
            too_long = TooLong(context=context, prompt=len(prompt_ids), new=wanted)
            raise beyond_context(too_long, param)
        if wanted is not None:
            return max(1, wanted)
        if self._chat_tokens is not None:
            return min(self._chat_tokens, room)
        return open_tokens(room, self._swarm.view.kv_tokens_free, left)

    def _check_options(
        self,
        request: CompletionRequest | ChatRequest,
        options: GenerationOptions,
        prompt_ids: tuple[int, ...],
        context: int,
    ) -> None:
        """Raises ApiError (400) for options that do not fit the model or this prompt."""
        try:
            options.new_tokens(len(prompt_ids), context)
        except UserError as error:
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise bad_request(str(error), param) from None
        spec = self._swarm.view.spec
        if spec is not None:
            try:
                options.check_ids(prompt_ids, spec.vocab)
            except UserError as error:
                raise mistake_in(request, error) from None
        if options.stop:
            self._tokenizer("stop")

    # Writing

    def _text_of(self, token_id: int) -> str:
        tokenizer = self._swarm.text.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)

    def _bytes_of(self, token_id: int) -> bytes:
        tokenizer = self._swarm.text.tokenizer
        return b"" if tokenizer is None else tokenizer.token_bytes(token_id)

    def _writer(self, job: Job, task: ChoiceTask) -> ChoiceWriter:
        return ChoiceWriter(job, task, self._text_of, self._bytes_of)

    async def whole(self, job: Job) -> Json:
        """The whole answer as one object; raises ApiError."""
        writers = [self._writer(job, task) for task in job.tasks]
        async with aclosing(
            self._answers.parts(self._swarm, job.tasks, job.who, job.accepted)
        ) as parts:
            async for part in parts:
                writers[part.index].add(part)
                _count(job, part)
        choices = await self._threads.run(
            sum(writer.size for writer in writers),
            lambda: [writer.whole() for writer in writers],
            job.who,
        )
        await self._count_thoughts(job, writers)
        return {**job.head.body(choices), "usage": job.usage.body}

    async def chunks(self, job: Job) -> AsyncGenerator[Json, None]:
        """The answer as chunks, the usage last where it is asked for; raises ApiError."""
        writers = [self._writer(job, task) for task in job.tasks]
        no_usage: Json = {"usage": None} if job.include_usage else {}
        async with aclosing(
            self._answers.parts(self._swarm, job.tasks, job.who, job.accepted)
        ) as parts:
            async for part in parts:
                if part.route is not None:
                    route = route_body(part.index, part.route, self._swarm.view.nodes)
                    yield {**job.head.body([]), "route": route, **no_usage}
                    continue
                _count(job, part)
                writer = writers[part.index]
                choices = await self._threads.run(
                    len(part.prompt_logprobs or ()) * writer.values_per_token,
                    partial(writer.chunks, part),
                    job.who,
                )
                for choice in choices:
                    yield {**job.head.body([choice]), **no_usage}
        if job.include_usage:
            await self._count_thoughts(job, writers)
            yield {**job.head.body([]), "usage": job.usage.body}

    async def _count_thoughts(self, job: Job, writers: Sequence[ChoiceWriter]) -> None:
        """Count the tokens of thoughts by their texts: a piece of an answer may be of several."""
        tokenizer = self._swarm.text.tokenizer
        if job.channels is None or tokenizer is None:
            return
        texts = [writer.thoughts for writer in writers]
        counts = await self._threads.run(
            sum(map(len, texts)),
            lambda: [len(tokenizer.encode(text, special_tokens=False)) for text in texts],
            job.who,
        )
        job.usage.reasoning_tokens = min(sum(counts), job.usage.completion_tokens)


def _check_scores(top: int | None, prompt_tokens: Sequence[int], n: int) -> None:
    """Raises ApiError (400) where the scores of all prompts, each ``n`` times, are more than one
    answer may have: in memory each takes some hundred bytes."""
    values = 0 if top is None else n * sum(scored_values(each, top) for each in prompt_tokens)
    if values > SCORED_VALUES_MAX:
        raise bad_request(
            f"echo with logprobs {top} asks for {values} log probabilities of prompts in all;"
            f" {SCORED_VALUES_MAX} at most",
            "logprobs",
        )


def _count(job: Job, part: ChoicePart) -> None:
    if part.piece.token_ids and job.first_token_s is None:
        job.first_token_s = asyncio.get_running_loop().time()
    job.usage.completion_tokens += len(part.piece.token_ids) if job.keeps_answer else 0
    if part.answer is not None:
        job.finish = finish_of(part.answer.finish_reason)
        if part.index % job.choices == 0:
            job.usage.cached_tokens += part.answer.cached_tokens
