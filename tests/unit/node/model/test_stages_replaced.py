"""A stage that is lost is rebuilt from logged rows, one that leaves is copied: the same answers."""

from pathlib import Path

import pytest
import torch

from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem
from node.kv.export import KvBytes, pack_kv
from testing.tiny_families import make
from tests.unit.node.model.test_families import engine_of, greedy, prompt_of

PROMPT, NEW_TOKENS, CUT = prompt_of(40, seed=40), 6, 2


def run(engine: Engine, position: int, rows: tuple[int, ...] | torch.Tensor) -> torch.Tensor | int:
    """Hidden rows, or at the last stage the token drawn."""
    start, end = engine.held
    item = WorkItem(
        session="s",
        start=start,
        end=end,
        position=position,
        token_ids=rows if isinstance(rows, tuple) else None,
        hidden=rows if isinstance(rows, torch.Tensor) else None,
        sampling=Sampling() if end == engine.spec.layers else None,
    )
    [result] = engine.step([item])
    assert result.error is None, result.error
    if result.hidden is not None:
        return result.hidden
    assert result.token_id is not None
    return result.token_id


def last_stage(directory: Path, layers: int) -> Engine:
    engine = engine_of(directory, CUT, layers)
    assert engine.kv.reserve("s", 64) is None
    return engine


@pytest.mark.parametrize(
    "name",
    ["gemma4, inputs and shared keys", "gemma3n", "glm_moe_dsa, chosen before", "minimax_m3"],
)
def test_the_session_goes_on(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    layers = model.config.get_text_config().num_hidden_layers
    first, last = engine_of(tmp_path, 0, CUT), last_stage(tmp_path, layers)
    assert first.kv.reserve("s", 64) is None
    answer: list[int] = []
    log: list[torch.Tensor] = []
    ids = PROMPT
    for step in range(NEW_TOKENS):
        position = sum(len(rows) for rows in log)
        hidden = run(first, position, ids)
        assert isinstance(hidden, torch.Tensor)
        log.append(hidden)
        if step == 2:  # the stage is lost, its rows come again in other chunks
            last, known = last_stage(tmp_path, layers), torch.cat(log[:-1])
            for at in range(0, position, 7):
                run(last, at, known[at : min(at + 7, position)])
        if step == 4:  # the stage leaves, its KV is copied
            body = pack_kv(last.kv.take("s", 0, position))
            last = last_stage(tmp_path, layers)
            came = KvBytes(start=CUT, end=layers, position=0, tokens=position, body=body)
            assert last.kv.put("s", came) is None
        token = run(last, position, hidden)
        assert isinstance(token, int)
        answer.append(token)
        ids = (token,)
    assert answer == greedy(model, PROMPT, NEW_TOKENS)
