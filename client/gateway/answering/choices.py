"""Writes the choices of an answer, whole or in chunks."""

import secrets
from collections.abc import Sequence
from typing import Any

from client.gateway.answering.answers import ChoicePart, ChoiceTask
from client.gateway.answering.job import Job
from client.gateway.protocols.answer_bodies import (
    BytesOf,
    CompletionLogprobs,
    TextOf,
    chat_logprobs,
    finish_of,
)
from client.gateway.structured.answer_reader import AnswerPart, AnswerReader, Thought
from client.gateway.structured.call_pieces import CallBegun, CallGrows
from client.gateway.structured.calls import Call
from client.text.arrangement import CALL_ID_CHARS
from dht.messages.logprobs import TokenScore
from dht.process.json_file import Json


class ChoiceWriter:
    """Writes one choice, whole or in chunks."""

    def __init__(self, job: Job, task: ChoiceTask, text_of: TextOf, bytes_of: BytesOf) -> None:
        """``text_of`` and ``bytes_of`` say what a token stands for."""
        self._job = job
        self._task = task
        self._text_of = text_of
        self._bytes_of = bytes_of
        self._text: list[str] = []
        self._scores: list[TokenScore] = []
        self._prompt: list[tuple[int, TokenScore | None]] = []
        self._finish: str | None = None
        self._stop: str | None = None
        """The stop string that ended it."""
        self._started = False
        self._reader: AnswerReader | None = None
        if job.is_chat and (job.calls is not None or job.channels is not None):
            self._reader = AnswerReader(
                job.calls,
                job.channels,
                opened=job.opened,
                parameters=job.parameters,
                in_pieces=job.streams,
            )
        self._calls = 0
        self._begun = 0
        """Calls that the answer made so far, told or not."""
        self._is_over = False
        """Whether nothing that follows is told."""
        self._thoughts: list[str] = []
        self._said, self._space = False, ""
        """Whether content came; white space that is content if more of it comes."""
        self._logprobs = CompletionLogprobs(text_of=text_of, top=job.logprobs_top or 0)

    @property
    def values_per_token(self) -> int:
        """Number of log probabilities that are written for a token."""
        return 0 if self._job.logprobs_top is None else 1 + self._job.logprobs_top

    @property
    def thoughts(self) -> str:
        """What it thought so far, told or not."""
        return "".join(self._thoughts)

    @property
    def size(self) -> int:
        """Number of log probabilities to write, and of characters to read for calls."""
        scores = (len(self._prompt) + len(self._scores)) * self.values_per_token
        return scores + (0 if self._reader is None else sum(map(len, self._text)))

    def add(self, part: ChoicePart) -> None:
        if part.prompt_logprobs is not None:
            self._prompt = list(zip(self._task.prompt_ids, part.prompt_logprobs, strict=True))
        if self._job.keeps_answer:
            self._text.append(part.piece.text)
            self._scores += part.piece.logprobs
        if part.answer is not None:
            self._finish = finish_of(part.answer.finish_reason)
            self._stop = part.answer.stop

    def whole(self) -> Json:
        """The choice of a whole answer."""
        job, text = self._job, "".join(self._text)
        finish = self._finish if job.keeps_answer else "length"
        if job.is_chat:
            message = {"role": "assistant", "refusal": None, **self._message(text)}
            finish = self._finish_of(finish)
            choice: Json = {"message": message, "logprobs": self._chat_logprobs(self._scores)}
        else:
            if job.echo:
                text = job.prompt_texts[self._task.index] + text
            choice = {
                "text": text,
                "logprobs": self._completion_logprobs(self._prompt, self._scores),
            }
        return {"index": self._task.index, **choice, "finish_reason": finish, **self._stopped}

    @property
    def _stopped(self) -> Json:
        """The stop string that ended the choice, under vLLM's name, where one did."""
        return {} if self._stop is None else {"stop_reason": self._stop}

    def _message(self, text: str) -> Json:
        """Content, thoughts and calls of a whole answer."""
        if self._reader is None:
            return {"content": text}
        parts = self._told([*self._reader.push(text), *self._reader.flush()], ends=True)
        content = "".join(part for part in parts if isinstance(part, str))
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        calls = [self._call(part) for part in parts if isinstance(part, Call)]
        found: Json = {"content": content or (None if thoughts or calls else "")}
        found |= {"reasoning_content": thoughts} if thoughts else {}
        return {**found, "tool_calls": calls} if calls else found

    def _told(self, parts: Sequence[AnswerPart], *, ends: bool) -> list[AnswerPart]:
        """The parts that the request wants to be told: the same in pieces as at once.

        White space after thoughts and before calls is how a template sets them apart, no content.
        """
        found: list[AnswerPart] = []
        for part in parts:
            if self._job.one_call and self._begun and not isinstance(part, CallGrows):
                self._is_over = True
            is_hidden = False
            match part:
                case Call() | CallBegun():
                    self._begun += 1
                    self._space = ""
                case Thought():
                    self._thoughts.append(part.text)
                    is_hidden = not (self._job.tells_thoughts and part.text)
            if self._is_over or is_hidden:
                continue
            if not isinstance(part, str):
                found.append(part)
                continue
            text = self._space + part
            text = text.lstrip() if self._thoughts and not self._said else text
            self._space = text[len(text.rstrip()) :]
            if text := text.rstrip():
                self._said = True
                found.append(text)
        if ends and self._space and not self._begun:
            found.append(self._space)
            self._space = ""
        return found

    def _deltas(self, text: str, *, ends: bool) -> list[Json]:
        """Content, thoughts and calls that became certain in a stream."""
        if self._reader is None:
            return [{"content": text}] if text else []
        parts = self._told(
            [*self._reader.push(text), *(self._reader.flush() if ends else ())], ends=ends
        )
        found: list[Json] = []
        for part in parts:
            match part:
                case str():
                    found.append({"content": part})
                case Thought():
                    found.append({"reasoning_content": part.text})
                case CallBegun():
                    found.append(self._call_begun(part.name))
                case CallGrows():
                    found.append(self._call_grows(part.arguments))
                case Call():
                    found += [self._call_begun(part.name), self._call_grows(part.arguments)]
        return found

    def _call_begun(self, name: str) -> Json:
        begun = {"index": self._calls, **self._call(Call(name=name, arguments=""))}
        return {"tool_calls": [begun]}

    def _call_grows(self, arguments: str) -> Json:
        piece = {"index": self._calls - 1, "function": {"arguments": arguments}}
        return {"tool_calls": [piece]}

    def _call(self, call: Call) -> Json:
        self._calls += 1
        name = self._job.names.get(call.name, call.name)
        function = {"name": name, "arguments": call.arguments}
        call_id = secrets.token_hex(5)[:CALL_ID_CHARS]
        return {"id": call_id, "type": "function", "function": function}

    def _finish_of(self, finish: str | None) -> str | None:
        return "tool_calls" if self._calls and finish == "stop" else finish

    def chunks(self, part: ChoicePart) -> list[Json]:
        """The choices of the chunks that a part makes."""
        job, found = self._job, []
        self._scores, self._text = [], []
        first = not self._started
        self._started = True
        self.add(part)
        text, prompt, self._prompt = "".join(self._text), self._prompt, []
        if first and job.is_chat:
            found.append(self._chunk({"role": "assistant", "content": ""}, None, None))
        if job.is_chat:
            deltas = self._deltas(text, ends=part.answer is not None)
            if self._scores and not deltas:
                deltas = [{"content": ""}]
            logprobs = self._chat_logprobs(self._scores)
            for delta in deltas:
                found.append(self._chunk(delta, logprobs, None))
                logprobs = None
            if part.answer is not None:
                found.append(self._chunk({}, None, self._finish_of(self._finish)))
            return found
        if first and job.echo:
            text = job.prompt_texts[self._task.index] + text
        if text or self._scores or prompt:
            logprobs = self._completion_logprobs(prompt, self._scores)
            found.append(self._chunk(text, logprobs, None))
        if part.answer is not None:
            found.append(self._chunk("", None, self._finish if job.keeps_answer else "length"))
        return found

    def _chunk(self, new: Any, logprobs: Json | None, finish: str | None) -> Json:
        name = "delta" if self._job.is_chat else "text"
        return {
            "index": self._task.index,
            name: new,
            "logprobs": logprobs,
            "finish_reason": finish,
            **({} if finish is None else self._stopped),
        }

    def _chat_logprobs(self, scores: Sequence[TokenScore]) -> Json | None:
        if self._job.logprobs_top is None:
            return None
        return chat_logprobs(scores, self._text_of, self._bytes_of)

    def _completion_logprobs(
        self,
        prompt: Sequence[tuple[int, TokenScore | None]],
        scores: Sequence[TokenScore],
    ) -> Json | None:
        if self._job.logprobs_top is None:
            return None
        return self._logprobs.add([*prompt, *((score.token_id, score) for score in scores)])
