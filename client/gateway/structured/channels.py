"""How models part their thoughts from what they say, as one table. Pure.

A model may put its thoughts between two marks at the beginning of an answer, or write messages that
each have a head: the channel, and whom the message is for. Which entry is a model's is found in its
chat template, never by its name.
"""

import re
from dataclasses import dataclass

from client.gateway.structured.calls import NAME

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"\bto=functions\.({NAME.pattern})")
THOUGHTS_CHANNEL = "analysis"
HEAD_CHARS_MAX = 1024
"""Maximum characters of a message's head; what is longer is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """How thoughts are parted from the rest of an answer."""

    known_by: tuple[str, ...]
    """What a chat template has, one of them at least, that knows these marks."""
    opens: tuple[str, ...]
    """Marks that begin thoughts, or the head of a message."""
    says: str = ""
    """Mark between the head of a message and its text; empty: messages have no heads."""
    closes: tuple[str, ...]
    """Marks that end thoughts, or a message."""
    prompt_ends: str = ""
    """What a prompt ends with behind which a message begins, with its head."""
    says_at_once: str = ""
    """The head of a message that is no thought and no call."""

    @property
    def marks(self) -> frozenset[str]:
        """Marks that stay in an answer's text though a tokenizer may call them special."""
        return frozenset(mark for mark in (*self.opens, self.says, *self.closes) if mark)

    @property
    def thoughts(self) -> tuple[str, str]:
        """What stands before and behind a thought at the beginning of an answer."""
        if not self.says:
            return self.opens[0], self.closes[0]
        head = f"{self.opens[-1]}{THOUGHTS_CHANNEL}{self.says}"
        return head, f"{self.closes[0]}{self.prompt_ends}"

    def opened_by(self, prompt: str) -> str | None:
        """The head of the thoughts or of the message that ``prompt`` ends within; None: of none."""
        if not self.says:
            return "" if prompt.rstrip().endswith(self.opens) else None
        at = prompt.rfind(self.says)
        ended = max(prompt.rfind(mark) for mark in (*self.opens, *self.closes))
        if at <= ended:
            return None
        begins = prompt.rfind(self.opens[0], 0, at)
        return prompt[max(begins, at - HEAD_CHARS_MAX) : at]


TAGGED_THOUGHTS = Channels(
    known_by=("<think>", "</think>"), opens=("<think>",), closes=("</think>",)
)
SEED_THOUGHTS = Channels(
    known_by=("<seed:think>",), opens=("<seed:think>",), closes=("</seed:think>",)
)
MESSAGES = Channels(
    known_by=("<|channel|>",),
    opens=("<|start|>", "<|channel|>"),
    says="<|message|>",
    closes=("<|end|>", "<|call|>", "<|return|>"),
    prompt_ends="<|start|>assistant",
    says_at_once="<|channel|>final<|message|>",
)
CHANNELS = (MESSAGES, SEED_THOUGHTS, TAGGED_THOUGHTS)
"""All that are known; of several that fit a template, the first is the model's."""


def channels_of(template: str) -> Channels | None:
    """How the model of this chat template parts its answers; None where it does not."""
    return next(
        (each for each in CHANNELS if any(mark in template for mark in each.known_by)), None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the head of a message says."""

    is_thought: bool
    calls: str = ""
    """The function that the message calls; empty: none."""


def head_of(text: str) -> Head:
    """What a message is, by the text before its own."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return Head(
        is_thought=channel is not None and channel[1] == THOUGHTS_CHANNEL,
        calls="" if recipient is None else recipient[1],
    )
