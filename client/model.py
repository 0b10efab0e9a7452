"""A swarm with the face of a ``transformers`` model: ``generate()`` with the same arguments.

    from anabranch import SwarmModel
    from transformers import AutoTokenizer, TextStreamer

    tokenizer = AutoTokenizer.from_pretrained("models/brook")
    with SwarmModel.from_swarm("anabranch:…", model="models/brook") as model:
        inputs = tokenizer("One morning", return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=64, streamer=TextStreamer(tokenizer))

No weights and no torch are needed here: tensors come in and go out as those of the caller.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from client.answer.generation import GenerationOptions
from client.answer.transformers_arguments import padded, understood, unpadded
from client.swarm.blocking import BlockingSwarm
from client.swarm.swarm import SwarmConfig
from dht.checkpoints.library_files import read_by_library
from dht.errors import UserError
from dht.process.json_file import read_object

CONFIG_FILE = "config.json"
ROWS_AT_ONCE = 16


class Streamer(Protocol):
    """``transformers``' streamers: tensors of ids as they come, then the end."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


class SwarmModel:
    """A model that a swarm serves. A context manager; :meth:`close` does the same."""

    def __init__(self, swarm: BlockingSwarm, close: Callable[[], None]) -> None:
        """``close`` leaves the swarm, which is connected."""
        self._swarm = swarm
        self.close = close
        """Leave the swarm."""
        self._defaults = _defaults(swarm.text.directory, swarm.text.stop_token_ids)

    @classmethod
    def from_swarm(
        cls,
        initial_peers: str | Sequence[str] = (),
        *,
        model: str = "",
        config: SwarmConfig | None = None,
    ) -> "SwarmModel":
        """``model`` is a directory or hub id, whose generation defaults are used, or a name.

        ``initial_peers`` are as for :meth:`client.swarm.swarm.Swarm.connect`. Connects at
        once, and raises as that says.
        """
        swarm = BlockingSwarm.connect(initial_peers, model=model, config=config)
        return cls(swarm, swarm.close)

    def __enter__(self) -> "SwarmModel":
        return self

    # What `transformers.pipeline("text-generation", model=…)` asks of a model beside `generate()`.

    @property
    def device(self) -> Any:
        """Where the caller's tensors are expected: on the CPU."""
        return import_module("torch").device("cpu")

    @property
    def dtype(self) -> Any:
        """Type of the caller's floats; what the peers compute in they say themselves."""
        return import_module("torch").float32

    @property
    def config(self) -> Any:
        """The model's ``transformers`` configuration, without the model's own code; an empty one
        where no directory is here."""
        transformers = import_module("transformers")
        if (directory := self._swarm.text.directory) is None:
            return transformers.PreTrainedConfig()
        with read_by_library(directory, (CONFIG_FILE,)) as cleaned:
            return transformers.AutoConfig.from_pretrained(cleaned, trust_remote_code=False)

    @property
    def generation_config(self) -> Any:
        """The model's own ``GenerationConfig``."""
        return import_module("transformers").GenerationConfig(**self._defaults)

    @property
    def name_or_path(self) -> str:
        """The model's directory, or its name in the network."""
        text = self._swarm.text
        return text.name if text.directory is None else str(text.directory)

    def can_generate(self) -> bool:
        """Always."""
        return True

    input_modalities = output_modalities = ("text",)

    def eval(self) -> "SwarmModel":
        """Nothing to do: a swarm does not train."""
        return self

    def to(self, *_: object, **__: object) -> "SwarmModel":
        """Nothing to do: the weights stay with the peers."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        streamer: Streamer | None = None,
        **named: Any,
    ) -> Any:
        """Prompts and answers as ids ``[rows, tokens]``, as ``transformers`` returns them.

        ``inputs`` (or ``input_ids``) is a tensor or lists ``[rows, tokens]``; what comes back is of
        the same kind. Greedy answers are those of ``transformers`` in float32. Sampled ones follow
        the same distribution but another random source: ``seed`` makes them repeatable, row n takes
        ``seed + n``. Padding is left out of what is computed; ``transformers`` lets
        ``repetition_penalty`` count it, this does not.

        Raises UserError, with the argument's name, for what a swarm cannot do, and
        UnavailableError when layers stay missing.
        """
        del token_type_ids  # decoder-only models take none; tokenizers may give it all the same
        tensor = inputs if inputs is not None else input_ids
        if tensor is None or (inputs is not None and input_ids is not None):
            raise UserError("give the prompt once, as inputs or as input_ids")
        rows = _rows("input_ids", tensor)
        mask = None if attention_mask is None else _rows("attention_mask", attention_mask)
        prompts = unpadded(rows, mask)
        spec = self._swarm.ready_spec()
        call = understood(
            {**_config(generation_config), **named},
            self._defaults,
            prompt_tokens=max(map(len, rows)),
            context_tokens=spec.context_tokens,
            vocab=spec.vocab,
        )
        if streamer is not None:
            answers = [self._streamed(prompts, tensor, call.options, streamer)]
        else:
            answers = self._answers(prompts, call.options)
        whole = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
        made = padded(whole, call.pad_token_id)
        return tensor.new_tensor(made) if hasattr(tensor, "new_tensor") else made

    def _answers(
        self, prompts: Sequence[tuple[int, ...]], options: GenerationOptions
    ) -> list[tuple[int, ...]]:
        """The answers to all prompts, asked together."""
        seed = options.seed
        asked = [
            (prompt, options if seed is None else replace(options, seed=seed + row))
            for row, prompt in enumerate(prompts)
        ]
        return [answer.token_ids for answer in self._swarm.generate_all(asked, ROWS_AT_ONCE)]

    def _streamed(
        self,
        prompts: Sequence[tuple[int, ...]],
        tensor: Any,
        options: GenerationOptions,
        streamer: Streamer,
    ) -> tuple[int, ...]:
        if len(prompts) != 1 or not hasattr(tensor, "new_tensor"):
            raise UserError("streamer takes one prompt at a time, as a tensor")
        streamer.put(tensor)
        answer: list[int] = []
        for piece in self._swarm.stream(prompts[0], options):
            for token_id in piece.token_ids:
                answer.append(token_id)
                streamer.put(tensor.new_tensor([token_id]))
        streamer.end()
        return tuple(answer)


def _rows(name: str, value: Any) -> list[list[int]]:
    rows = value.tolist() if hasattr(value, "tolist") else value
    try:
        whole = [[operator.index(each) for each in row] for row in rows]
    except TypeError:
        whole = [[]]
    if len({len(row) for row in whole}) > 1 or not all(whole):
        raise UserError(f"{name} takes token ids of shape [rows, tokens]")
    return whole


def _config(config: Any) -> dict[str, Any]:
    """What a ``GenerationConfig`` (or a mapping) sets."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not hasattr(config, "to_diff_dict"):
        raise UserError("generation_config takes a transformers.GenerationConfig or a mapping")
    return dict(config.to_diff_dict())


def _defaults(directory: Path | None, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """The model's own generation configuration."""
    own: dict[str, Any] = {"eos_token_id": list(stop_token_ids)} if stop_token_ids else {}
    if directory is None:
        return own
    try:
        said = read_object(directory / "generation_config.json")
    except (OSError, ValueError):
        return own
    return own | {name: value for name, value in said.items() if value is not None}
