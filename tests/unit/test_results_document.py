"""The papers' recipes: what is kept of a run, and the document made of it."""

from pathlib import Path

import pytest

from bench import results_table
from bench.papers import jobs
from bench.papers.jobs import Job, Recipe, Results, Row
from bench.papers.recipes import RECIPES

SOURCES = ("bench/papers/jobs.py",)


def counted(log: Path, value: int) -> Row:
    with log.open("a") as file:
        file.write(f"{value}\n")
    if value < 0:
        raise ValueError("this one fails")
    return {"value": value}


def recipe_of(log: Path, *values: int, sources: tuple[str, ...] = SOURCES) -> Recipe:
    made = [
        Job(key=str(value), call=counted, arguments={"log": log, "value": value})
        for value in values
    ]
    return Recipe(name="counted", title="counted", jobs=lambda: made, sources=sources)


def test_a_run_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RESULTS", tmp_path)
    log = tmp_path / "log"
    assert jobs.run([recipe_of(log, 1, -1, 2)], processes=1) == 1  # one fails, the others run
    assert sorted(log.read_text().split()) == ["-1", "1", "2"]
    assert not Results(recipe_of(log, 1, -1, 2)).complete
    assert jobs.run([recipe_of(log, 1, 2, 3)], processes=1) == 0
    assert log.read_text().split()[3:] == ["3"]
    assert Results(recipe_of(log, 1, 2, 3)).complete
    changed = recipe_of(log, 1, 2, sources=("bench/papers/helix.py",))
    assert len(Results(changed).missing()) == 2
    assert not Results(changed, any_age=True).missing()
    assert len(Results(recipe_of(log, 1, 2), again=True).missing()) == 2


@pytest.mark.parametrize(
    "document",
    [each for each in results_table.DOCUMENTS if results_table.MARKED.search(each.read_text())],
    ids=lambda each: each.stem,
)
def test_a_document_says_what_the_results_say(document: Path) -> None:
    """But for which figures are old, which changes with the code."""
    kept, written = (
        text.split("## Figures older than the code")[0]
        for text in (document.read_text(), results_table.written(document))
    )
    assert written == kept, "run python -m bench.results_table"


def test_every_recipe_has_a_section() -> None:
    papers = results_table.environment().get_template("papers.md.j2").module
    assert set(papers.sections) == set(RECIPES)  # type: ignore[attr-defined]
