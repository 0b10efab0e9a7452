"""Documents, and what commands say of themselves: short sentences, standard terms."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from anabranch.commands import COMMANDS as BY_NAME
from testing.documents import SENTENCE_WORDS_MAX, long_sentences, private_words, sentences
from tests.unit.test_help import COMMANDS, running, shown_by

ROOT = Path(__file__).parents[2]
GUIDES = (
    *("README.md", "docs/start.md", "docs/ask.md", "docs/lend-a-gpu.md", "docs/private-swarm.md"),
    *("docs/public-page.md", "docs/how-it-works.md", "docs/what-works.md", "docs/agents.md"),
    *("docs/weights.md", "docs/index.md", "CONTRIBUTING.md", "SECURITY.md"),
)
REFERENCES = (
    *("docs/protocol.md", "docs/architecture.md", "docs/families.md", "docs/health.md"),
    *("docs/threat-model.md", "docs/gateway.md"),
)
FIGURES = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)


@pytest.mark.parametrize("name", [*GUIDES, *REFERENCES])
def test_a_pages_sentences_are_short_and_its_words_are_known(name: str) -> None:
    text = (ROOT / name).read_text()
    if name in REFERENCES:  # measured things have names of their own, and lists of these
        text = FIGURES.sub("", text)
    assert not long_sentences(text)
    assert not private_words(text)


def test_the_counting_of_words_counts() -> None:
    long = " ".join(["word"] * (SENTENCE_WORDS_MAX + 1))
    text = f"# Title\n\nOne two. Three:\n- `a b` c\n\n    code here\n\n{long}."
    assert sentences(text) == [*("", "Title", "One two.", "Three:", "X c"), f"{long}."]
    assert long_sentences(text) == [f"{long}."]


def test_a_table_within_a_list_has_cells() -> None:
    table = "- Calls:\n\n  | a | b |\n  |---|---|\n  | one | two |"
    assert {"one", "two"} <= set(sentences(table))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_and_docstring_are_plain(command: str) -> None:
    found = importlib.util.find_spec(running(command))
    assert found is not None
    assert found.origin is not None
    said = ast.get_docstring(ast.parse(Path(found.origin).read_text())) or ""
    assert not long_sentences(said)
    rare = "--help-all" in " ".join(shown_by(command))
    shown = "\n".join(shown_by(command, "--help-all" if rare else "--help"))
    assert not private_words(f"{said}\n\n{shown}")


PARTS = ("anabranch", "client", "coordinator", "dht", "node")
MODULES = {command.function.partition(":")[0] for command in BY_NAME.values()}
MODULE = re.compile(
    rf"(?<!-m )(?<![\w./])({'|'.join(sorted(map(re.escape, MODULES)))})(?!\.?\w|[/:-])"
)


def said_in(file: Path) -> list[str]:
    """The texts of several words in a source file, without its docstrings."""
    tree = ast.parse(file.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in bare)
    return [each.value for each in found if isinstance(each.value, str) and " " in each.value]


def test_what_people_read_names_commands_and_no_modules() -> None:
    texts = [
        text for part in PARTS for file in (ROOT / part).rglob("*.py") for text in said_in(file)
    ]
    assert "leave it out or give a value" in " ".join(texts)
    assert not [text for text in texts if MODULE.search(text)]
    assert MODULE.search("as node.join prints them, or found it with node.join.")
