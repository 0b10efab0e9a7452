"""What joined peers are asked, and what tells a right answer from a wrong one."""

from pathlib import Path

from bench.families.every_family import PROMPT, made
from bench.families.joined import CHUNKS, KEPT_TOKENS, Sequenced, prompts, strayed


def test_long_prompts_share_whole_pages_and_leave_chunks_of_their_own() -> None:
    long, short = prompts()
    assert len({prompt[:KEPT_TOKENS] for prompt in long}) == 1
    assert tuple(len(prompt) - KEPT_TOKENS for prompt in long) == CHUNKS
    assert KEPT_TOKENS % 16 == 0
    assert len(set(short)) == len(short)


def test_a_token_that_the_library_would_not_give_is_found(tmp_path: Path) -> None:
    answer = tuple(made("llama", tmp_path))
    assert strayed(tmp_path, [Sequenced(PROMPT, answer)]) == ""
    wrong = (*answer[:2], (answer[2] + 1) % 100, *answer[3:])
    said = strayed(tmp_path, [Sequenced(PROMPT, answer), Sequenced(PROMPT, wrong)])
    assert said == (
        f"through node.join, token 2 behind {len(PROMPT)} is {wrong[2]} instead of {answer[2]}"
    )
