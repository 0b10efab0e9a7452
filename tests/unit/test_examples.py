"""Laws are tried on the same examples in every run, whatever ran before in the same process."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.skipif(not settings.default.derandomize, reason="make fuzz draws others each time")
def test_modules_that_happen_to_be_loaded_change_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    @settings(max_examples=300)
    @given(st.integers(0, 10**9))
    def law(number: int) -> None:
        drawn.append(number)

    law()
    before = drawn.copy()
    drawn.clear()
    source = tmp_path / "loaded_meanwhile.py"
    source.write_text("NUMBERS = " + repr(list(range(10**6, 10**6 + 500))))
    module = ModuleType("loaded_meanwhile")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    law()
    assert drawn == before
