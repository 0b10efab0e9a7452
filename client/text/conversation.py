"""What a terminal chat remembers, cut to what the model's context takes. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dht.errors import UserError

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one side said. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    text: str

    def as_message(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        return {"role": self.role, "content": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns, the oldest first; a system turn stands first and is never forgotten."""

    turns: tuple[Turn, ...] = ()

    def said(self, role: str, text: str) -> "Conversation":
        """The conversation with one more turn."""
        return Conversation(turns=(*self.turns, Turn(role=role, text=text)))

    def with_system(self, text: str) -> "Conversation":
        """The conversation under other instructions; empty ones are none."""
        rest = tuple(turn for turn in self.turns if turn.role != "system")
        return Conversation(turns=((Turn(role="system", text=text), *rest) if text else rest))

    def plain_text(self) -> str:
        """All turns as one text, for models without a chat template."""
        return "".join(turn.text for turn in self.turns if turn.role != "system")


def fitted(
    conversation: Conversation, encode: Callable[[Sequence[Turn]], Ids], room_tokens: int
) -> tuple[Ids, int]:
    """The prompt of at most ``room_tokens`` tokens, and how many old turns were left out for it.

    Whole exchanges are left out, the oldest first: templates want users and assistants in turn.

    Raises UserError when the last turn alone is too long.
    """
    system = tuple(turn for turn in conversation.turns if turn.role == "system")
    rest = tuple(turn for turn in conversation.turns if turn.role != "system")
    for left_out in range(0, max(1, len(rest)), 2):
        prompt = encode((*system, *rest[left_out:]))
        if len(prompt) <= room_tokens:
            return prompt, left_out
    raise UserError(
        f"this message has {len(prompt)} tokens with its surroundings; the model's context has"
        f" room for {room_tokens} beside the answer"
    )
