"""Text to tokens and back: tokenizer, chat template, a chat's memory."""
