"""Every family, however its layers are split and the work is cut: ids equal ``transformers``'."""

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dht.errors import UserError
from dht.messages.session import Sampling
from node.engine.engine import Engine, WorkItem
from node.model.inspection.skeleton import rotates_by_length
from node.model.linear import packed_linear
from testing.tiny_families import CONTEXT, FAMILIES, REFUSED, VOCAB, WINDOW, make
from tests.unit.node.engines import loaded

GREEDY = Sampling()
NEW_TOKENS = 5
LOGIT_ERROR_MAX = 1e-4
PROMPTS = (1, WINDOW - 4, WINDOW + 9, 71)  # the second crosses a window token by token
CHUNKS = (1, 7, 64)


@pytest.fixture(autouse=True)
def _packed_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute as large ones do."""
    monkeypatch.setattr(packed_linear, "NUMBERS_LEAST", 1)


@dataclass
class Session:
    """A prompt on its way through stages that may overlap."""

    name: str
    prompt: tuple[int, ...]
    chunk: int
    spans: list[tuple[int, int, int]]
    """``(stage, start, end)``: which of a stage's layers run this session."""
    answer: list[int] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)


def split(rng: random.Random, layers: int) -> list[tuple[int, int]]:
    """Ranges of 1 to 4 stages that cover all layers and may overlap."""
    inner = sorted(rng.sample(range(1, layers), rng.randint(0, min(3, layers - 1))))
    bounds = [0, *inner, layers]
    return [
        (max(0, start - rng.randint(0, 2)), min(layers, end + rng.randint(0, 2)))
        for start, end in itertools.pairwise(bounds)
    ]


def route(rng: random.Random, ranges: list[tuple[int, int]], layers: int) -> list[Any]:
    """Each layer once, by any of the stages that hold it, in order of the stages."""
    spans, at = [], 0
    for stage, (start, end) in enumerate(ranges):
        later = [first for first, _ in ranges[stage + 1 :]]
        if not start <= at < end:
            continue
        least = max(at + 1, min([*later, layers]) if later else layers)
        stop = rng.randint(min(least, end), end)
        spans.append((stage, at, stop))
        at = stop
    if at != layers:
        return [(stage, s, e) for stage, (s, e) in enumerate(exact(ranges)) if s < e]
    return spans


def exact(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stages' ranges without their overlap: each runs to its own end."""
    spans, at = [], 0
    for start, end in ranges:
        assert start <= at
        spans.append((at, max(at, end)))
        at = max(at, end)
    return spans


def step_all(engines: list[Engine], work: list[tuple[Session, int, int, bool]]) -> None:
    """One chunk ``[first, last)`` of each session through all stages, in shared steps."""
    hidden: dict[str, torch.Tensor] = {}
    for stage, engine in enumerate(engines):
        items, of = [], []
        for session, first, last, sample in work:
            for at, start, end in session.spans:
                if at == stage:
                    items.append(
                        WorkItem(
                            session=session.name,
                            start=start,
                            end=end,
                            position=first,
                            token_ids=session.ids[first:last] if start == 0 else None,
                            hidden=hidden.get(session.name),
                            sampling=GREEDY if sample and end == engine.spec.layers else None,
                        )
                    )
                    of.append(session)
        for session, result in zip(of, engine.step(items) if items else [], strict=True):
            assert result.error is None, result.error
            if result.hidden is not None:
                hidden[session.name] = result.hidden
            if result.token_id is not None:
                session.answer.append(result.token_id)


def serve(engines: list[Engine], sessions: list[Session]) -> None:
    """Answer all sessions together; each step takes the next chunk of every one."""
    for engine in engines:
        for session in sessions:
            assert engine.kv.reserve(session.name, len(session.prompt) + NEW_TOKENS) is None
    done = {session.name: 0 for session in sessions}
    while True:
        work = []
        for session in sessions:
            first = done[session.name]
            known = len(session.ids)
            if first < known and len(session.answer) < NEW_TOKENS:
                last = min(known, first + session.chunk)
                work.append((session, first, last, last == known))
                done[session.name] = last
        if not work:
            break
        step_all(engines, work)
    for engine in engines:
        for session in sessions:
            engine.kv.free(session.name)


def prompt_of(tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (tokens,), generator=generator).tolist())


def greedy(model: Any, ids: tuple[int, ...], new: int) -> list[int]:
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new,
            pad_token_id=0,
        )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def engine_of(directory: Path, start: int, end: int, device: str = "cpu") -> Engine:
    return loaded(directory, start, end, device=device)


def rows_of(model: Any, prompt: tuple[int, ...], answer: list[int]) -> torch.Tensor:
    """The logits behind the prompt and behind each token of the answer but the last."""
    with torch.inference_mode():
        whole: torch.Tensor = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    return whole[len(prompt) - 1 :]


def listen(engine: Engine, logits: list[torch.Tensor]) -> None:
    """Note what the engine draws from."""
    leave = engine.loaded.forward.leave

    def listening(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(leave(hidden))
        return logits[-1]

    engine.loaded.forward.leave = listening  # type: ignore[method-assign]


on_cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_answers_equal_the_whole_models(name: str, device: str, tmp_path: Path) -> None:
    """On every device by the same bars; ``transformers`` runs on the CPU."""
    model = make(tmp_path, name)
    rng = random.Random(name)
    layers = model.config.get_text_config().num_hidden_layers
    ranges = split(rng, layers)
    engines = [engine_of(tmp_path, start, end, device) for start, end in ranges]
    logits: list[torch.Tensor] = []
    for engine in engines:
        listen(engine, logits)
    prompts = [prompt_of(tokens, seed=tokens) for tokens in PROMPTS]
    expected = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    sessions = [
        Session(name=f"{n}/{chunk}", prompt=p, chunk=chunk, spans=route(rng, ranges, layers))
        for chunk in CHUNKS
        for n, p in enumerate(prompts)
        if chunk > 1 or len(p) < WINDOW
    ]
    serve(engines, sessions)
    for session in sessions:
        number = int(session.name.split("/")[0])
        assert session.answer == expected[number], (session.name, ranges, session.spans)
    drawn = torch.cat(logits).to("cpu")
    assert len(drawn) == len(sessions) * NEW_TOKENS
    known = torch.cat([rows_of(model, *each) for each in zip(prompts, expected, strict=True)])
    errors = (drawn[:, None] - known[None]).abs().amax(-1).amin(-1)
    assert errors.max() < LOGIT_ERROR_MAX  # every row drawn from is one of the model's own


@pytest.mark.parametrize("cap", [0.0, -0.25])
def test_scores_capped_by_no_number_above_0_are_the_whole_models(
    cap: float, tmp_path: Path
) -> None:
    make(tmp_path, "gemma2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_logit_softcapping": cap}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = engine_of(tmp_path, 0, 4)
    logits: list[torch.Tensor] = []
    listen(engine, logits)
    session = Session(name="a", prompt=prompt_of(20), chunk=7, spans=[(0, 0, 4)])
    serve([engine], [session])
    known = rows_of(model, session.prompt, session.answer)
    assert (torch.cat(logits) - known).abs().max() < LOGIT_ERROR_MAX


@pytest.mark.parametrize("name", ["phi3, longrope", "falcon_h1, longrope"])
def test_rotation_by_length_goes_by_what_a_session_may_reach(name: str, tmp_path: Path) -> None:
    """Short and long sessions share steps, each with its own frequencies."""
    model = make(tmp_path, name)
    engine = engine_of(tmp_path, 0, 4)
    assert engine.layout.structure.by_length
    for tokens in (20, 90):  # below and beyond the switching point of 64
        sessions = [
            Session(name=f"{tokens}/{n}", prompt=prompt_of(n), chunk=9, spans=[(0, 0, 4)])
            for n in (tokens, 110 - tokens)
        ]
        serve([engine], sessions)
        for session in sessions:
            assert session.answer == greedy(model, session.prompt, NEW_TOKENS)


@pytest.mark.parametrize(
    ("said", "goes"),
    [
        (None, False),
        ("default", False),
        ("longrope", True),
        ("dynamic", True),
        ({"full_attention": "longrope", "sliding_attention": "default"}, True),
        ({"full_attention": "yarn", "sliding_attention": "default"}, False),
    ],
)
def test_who_rotates_by_length_is_known_for_each_kind_of_layer(said: Any, goes: bool) -> None:
    module: Any = torch.nn.Module()
    if said is not None:
        module.rope_type = said
    assert rotates_by_length(module) is goes


def test_behind_the_longest_context_nothing_is_read(tmp_path: Path) -> None:
    """Where positions are learned there are no more."""
    make(tmp_path, "gpt2")
    engine = engine_of(tmp_path, 0, 4)
    assert engine.kv.reserve("s", CONTEXT + 1) is None
    whole = WorkItem(session="s", start=0, end=4, position=0, token_ids=prompt_of(CONTEXT))
    assert engine.step([whole])[0].error is None
    more = WorkItem(session="s", start=0, end=4, position=CONTEXT, token_ids=(1,))
    assert "at most" in (engine.step([more])[0].error or "")


def test_a_checkpoint_that_is_quantised_is_not_taken_for_numbers(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
    }
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="no config_groups"):
        engine_of(tmp_path, 0, 1)


REASONS = dict.fromkeys(REFUSED, "state other than keys and values") | {
    "recurrent_gemma": "keep a state themselves",
    "rwkv": "cannot be run one by one",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_served_says_so_before_it_loads(name: str, tmp_path: Path) -> None:
    make(tmp_path, name)
    with pytest.raises(UserError, match="cannot be served yet") as caught:
        engine_of(tmp_path, 0, 1)
    assert REASONS[name] in str(caught.value)
