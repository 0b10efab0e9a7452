"""A conversation as the token ids that a model was trained on, by its own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from client.text.arrangement import arranged
from client.text.chat_template import ChatTemplate
from client.text.tokenizer import ModelText, Tokenizer
from dht.errors import UserError

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's form, ``{"role": "user", "content": "…"}``, the oldest first; a text
alone is one message of the user."""


def chat_template_of(text: ModelText) -> ChatTemplate | None:
    """The template among a model's text files; None where the model has none, or no tokenizer is
    here. Raises UserError for an invalid template."""
    if text.directory is None or text.tokenizer is None:
        return None
    return ChatTemplate.load(text.directory)


def chat_ids(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, **options: Any
) -> tuple[int, ...]:
    """The prompt of a conversation, with the special tokens that the template writes.

    A last message of the assistant is continued. ``options`` are what the template takes beside,
    such as ``enable_thinking``. Raises UserError for what are no messages, and with the template's
    reason for those that it refuses or has no place for.
    """
    given = _checked(messages)
    continued = given[-1]["role"] == "assistant"
    shown: dict[str, Any] = {"options": options, "add_generation_prompt": not continued}
    text = template.render(
        arranged(template, given, **shown), continue_final_message=continued, **shown
    )
    return tokenizer.encode(text, special_tokens=False)


def _checked(messages: Messages) -> list[dict[str, Any]]:
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(given, Sequence) or not given:
        raise UserError("messages takes a text, or a list of messages with role and content")
    for at, each in enumerate(given):
        whole = isinstance(each, Mapping) and all(
            isinstance(each.get(name), str) for name in ("role", "content")
        )
        if not whole:
            raise UserError(
                f"messages[{at}] must have role and content as texts, such as"
                ' {"role": "user", "content": "Hello"}'
            )
    return [dict(each) for each in given]
