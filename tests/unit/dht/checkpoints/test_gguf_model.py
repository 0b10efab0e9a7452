"""A GGUF file as a model's directory: what peers and clients read of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
from transformers import AutoTokenizer

from client.swarm.swarm import _text_of, named_of
from client.text.chat_template import ChatTemplate
from client.text.tokenizer import ModelText
from dht.checkpoints.gguf_model import model_directory, split_names
from dht.checkpoints.hub import served_name
from dht.checkpoints.model_files import directory_root
from dht.errors import UserError
from node.links.text_server import ServedTexts
from node.weights.store import WeightStore
from testing.gguf_files import of_kind, tokens_of, write_gguf

BROOK = Path("models/brook")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEXTS = ("Once upon a time", " two  spaces, and ünïcode!", "<|endoftext|>x")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def brook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a GGUF file with its tokenizer and a chat template."""
    file = tmp_path_factory.mktemp("gguf") / "brook.gguf"
    tokens = {**tokens_of(BROOK), "ggml.eot_token_id": 7, "chat_template": TEMPLATE}
    write_gguf(BROOK, file, of_kind("Q8_0"), tokens=tokens)
    return file


def test_texts_are_those_that_transformers_makes(brook: Path) -> None:
    text = _text_of(str(brook))
    assert isinstance(text, ModelText)
    assert text.tokenizer is not None
    assert text.directory is not None
    theirs = AutoTokenizer.from_pretrained(brook.parent, gguf_file=brook.name)
    published = AutoTokenizer.from_pretrained(BROOK)
    for words in TEXTS:
        assert text.tokenizer.encode(words) == tuple(theirs.encode(words))
        assert text.tokenizer.encode(words) == tuple(published.encode(words))
    assert text.stop_token_ids == (1, 7)
    template = ChatTemplate.load(text.directory)
    assert template is not None
    assert "user: hello" in template.render([{"role": "user", "content": "hello"}])
    config = json.loads((text.directory / "config.json").read_text())
    said = json.loads((BROOK / "config.json").read_text())
    for key in ("model_type", "vocab_size", "tie_word_embeddings", "num_key_value_heads"):
        assert config[key] == said[key]


def test_a_model_has_the_name_of_its_file(brook: Path) -> None:
    assert served_name(str(brook)) == named_of(str(brook)) == "brook"
    assert served_name("no/such.gguf") == "no/such.gguf"
    text = _text_of(str(brook))
    assert isinstance(text, ModelText)
    assert text.name == "brook"


def test_peers_pass_on_what_clients_check(brook: Path) -> None:
    store = WeightStore.open(str(brook))
    served = ServedTexts.of(store.directory, store.weights_digest)
    assert served.root == store.root
    names = {file.name for file in served.found.files}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "chat_template.jinja"} <= names
    text = _text_of(str(brook))
    assert isinstance(text, ModelText)
    assert text.root == store.root == directory_root(store.directory)


def test_the_same_file_elsewhere_is_the_same_model(brook: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other" / "brook.gguf"
    copy.parent.mkdir()
    shutil.copy(brook, copy)
    first, second = WeightStore.open(str(brook)), WeightStore.open(str(copy))
    assert first.directory != second.directory
    assert first.root == second.root


def test_the_directory_is_made_once_and_again_where_the_file_changes(
    brook: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.gguf"
    shutil.copy(brook, file)
    first = model_directory(str(file))
    assert model_directory(str(file)) == first
    write_gguf(BROOK, file, of_kind("Q4_0"))
    assert model_directory(str(file)) != first


def test_directories_of_files_that_are_gone_are_removed(brook: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    shutil.copy(brook, file)
    first = model_directory(str(file))
    assert first is not None
    file.rename(tmp_path / "moved.gguf")
    assert (first / "config.json").is_file()
    second = model_directory(str(tmp_path / "moved.gguf"))
    assert second is not None
    assert not first.exists()
    assert (second / "config.json").is_file()


def test_what_is_neither_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    for name in ("nowhere", "nowhere.gguf", "model.bin"):
        assert model_directory(str(tmp_path / name)) is None
    assert model_directory(str(tmp_path)) == tmp_path


def small(file: Path, architecture: str, **values: Any) -> Path:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in values.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", np.ones((4, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    file = small(tmp_path / "m.gguf", "starlight")
    with pytest.raises(UserError, match="does not read its architecture 'starlight'") as caught:
        model_directory(str(file))
    assert "\n" not in str(caught.value)


def test_a_file_without_an_architecture_is_named(tmp_path: Path) -> None:
    file = small(tmp_path / "m.gguf", "llama")
    raw = file.read_bytes().replace(b"general.architecture", b"general.architectura")
    file.write_bytes(raw)
    with pytest.raises(UserError, match="does not say of which architecture"):
        model_directory(str(file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends within its header"),
        (b"GGUF", "ends within its header"),
        (b"PK\x03\x04" * 99, "does not begin as a GGUF file"),
    ],
)
def test_damage_is_named_in_a_line(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        WeightStore.open(str(file))
    assert not list((tmp_path / "home").rglob("config.json"))


def test_parts_of_a_split_file_name_each_other(tmp_path: Path) -> None:
    assert split_names("m.gguf") == ["m.gguf"]
    assert split_names("m-00002-of-00002.gguf") == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert served_name("m-00002-of-00002.gguf") == "m-00002-of-00002.gguf"  # no such file
    small(tmp_path / "m-00002-of-00002.gguf", "llama")
    assert served_name(str(tmp_path / "m-00002-of-00002.gguf")) == "m"
    for wrong in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-00001-of-09999.gguf"):
        with pytest.raises(UserError, match="no part"):
            split_names(wrong)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for part in (1, 2):
        file = tmp_path / f"m-0000{part}-of-00002.gguf"
        small(file, "llama", split__count=2)
    with pytest.raises(UserError, match=r"two of its files hold token_embd\.weight"):
        model_directory(str(file))
    alone = small(tmp_path / "alone.gguf", "llama", split__count=3)
    with pytest.raises(UserError, match="it is one of 3 files, not 1"):
        model_directory(str(alone))
