"""From the head's logits to a token: penalties, the draw, logprobs."""
