"""A request that was understood: what to run, and how its answers are written."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from client.gateway.answering.answers import ChoiceTask
from client.gateway.protocols.answer_bodies import ChunkHead, Usage
from client.gateway.structured.call_formats import CallFormat
from client.gateway.structured.channels import Channels
from client.gateway.structured.schemas import Schema


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that was understood: what to run, and how its answers are written."""

    head: ChunkHead
    tasks: list[ChoiceTask]
    usage: Usage
    """Tokens used so far; all prompts count from the beginning."""
    choices: int
    """Choices of each prompt, one behind the other."""
    streams: bool
    include_usage: bool
    is_chat: bool
    logprobs_top: int | None
    echo: bool = False
    keeps_answer: bool = True
    """False where only the prompt is wanted back (``echo`` with ``max_tokens`` 0)."""
    prompt_texts: list[str] = field(default_factory=list)
    """Text of each choice's prompt, for ``echo``."""
    calls: CallFormat | None = None
    """How calls are read in the answers, where functions are offered."""
    one_call: bool = False
    """Whether the first call of an answer is its only one: what follows it is left out."""
    tells_thoughts: bool = True
    parameters: Mapping[str, Schema] = field(default_factory=dict)
    """The schemas of those functions' arguments by their names."""
    channels: Channels | None = None
    """How thoughts are read in the answers."""
    opened: str | None = None
    """The head of the thoughts or of the message that the prompt ends within."""
    who: str = ""
    """Who asks, for the turns to answer."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the request calls its functions, by the names that the model sees."""
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all stages of a first choice's route have accepted it."""
    first_token_s: float | None = None
    """When the first token came, by the event loop's clock."""
    finish: str | None = None
    """Why the choice that ended last did."""

    @property
    def most_tokens(self) -> int:
        """The most tokens that prompts and answers may have together."""
        return self.usage.prompt_tokens + sum(
            task.options.max_new_tokens or 0 for task in self.tasks
        )
