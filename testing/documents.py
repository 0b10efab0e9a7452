"""What the documents tell people to type: commands, and programs in Python."""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from testing.paths import ROOT

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
_STARTS = r"(?:\S*/)?(?:anabranch|python(?:3\.11)? -m)\s"
_INDENTED = re.compile(rf"^ {{4,7}}((?:[A-Z_]+=\S+ )*{_STARTS}.*)$", re.MULTILINE)
_INLINE = re.compile(rf"`({_STARTS}[^`]*)`", re.MULTILINE)
_FENCED = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SENTENCE_WORDS_MAX = 30
PRIVATE = re.compile(r"(?<!--)\b(reckon\w*|mend\w*|laws?|rooms?|beside|rounds?)\b", re.IGNORECASE)
"""Words that a standard term says better; names of options stay as they are."""


@dataclass(frozen=True, slots=True)
class Typed:
    """A command in a document."""

    page: str
    words: tuple[str, ...]
    """The command's name, or module, and its arguments."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def programs(page: Path) -> list[str]:
    """The page's programs in Python."""
    return _PYTHON.findall(page.read_text())


def imported(program: str) -> set[str]:
    """The packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def commands(page: Path) -> list[Typed]:
    """The page's commands of this software: ``anabranch`` and what ``python -m`` runs."""
    text = page.read_text()
    lines = [*_INDENTED.findall(text), *_INLINE.findall(text)]
    for block in _FENCED.findall(text):
        lines += [each for each in block.splitlines() if re.match(_STARTS, each)]
    found = []
    for line in lines:
        words = shlex.split(" ".join(line.split()), comments=True)
        while "=" in words[0]:
            words = words[1:]
        if "python" in words[0]:
            words = words[1:]
        ends = [at for at, word in enumerate(words) if word in {"|", ">", "&&", ";"}]
        words = words[1 : min(ends, default=len(words))]
        if words and words[0] == "anabranch":
            words = words[1:]
        if words:
            found.append(Typed(page.name, tuple(words)))
    return found


def prose(text: str) -> list[str]:
    """The paragraphs, list items and table cells of Markdown, without code."""
    text = re.sub(r"^```.*?^```\s*$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            continue
        if lines[0].lstrip().startswith("|"):
            found += [cell for line in lines for cell in line.strip(" |").split("|")]
            continue
        item = ""
        for line in lines:
            if re.match(r"\s*([-*>#]+|\d+\.)\s", line):
                found.append(item)
                item = re.sub(r"^\s*([-*>#]+|\d+\.)\s", "", line)
            else:
                item = f"{item} {line.strip()}"
        found.append(item)
    return [re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", each)) for each in found]


def sentences(text: str) -> list[str]:
    """The sentences of Markdown; a colon or semicolon ends one, code counts as a word."""
    return [
        sentence
        for each in prose(text)
        for sentence in re.split(r"(?<=[.!?:;])[)*]*\s+", each.strip())
    ]


def long_sentences(text: str) -> list[str]:
    """The sentences of Markdown that have more words than a reader can hold."""
    return [s for s in sentences(text) if len(re.findall(r"\S*\w\S*", s)) > SENTENCE_WORDS_MAX]


def private_words(text: str) -> list[str]:
    """The paragraphs of Markdown with a word of our own for a standard term."""
    return [p for p in prose(text) if PRIVATE.search(re.sub(r"round[ -]trips?", "", p))]
