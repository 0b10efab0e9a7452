"""The rule that refuses new module-level numbers."""

from tests.module_numbers import complaints, numbers

SOURCE = '''
A = 1
B: float = -2.5e3
C, D = 1 << 20, "no"
E = 3 * A
F = (1, 2)
G = True
I = 8
"""Fixed by the format: bytes of its header."""
J = 9
"""A choice of ours."""

class Config:
    h: int = 4
'''


def test_numbers_are_counted_and_what_others_give_or_fix_is_not() -> None:
    assert numbers(SOURCE) == ["A", "B", "C", "J"]


def test_a_file_may_not_have_more_than_it_had() -> None:
    named = {"node/new.py": ["A"], "node/old.py": ["A", "B"], "node/less.py": ["A"]}
    (new,) = complaints(named, {"node/old.py": 2, "node/less.py": 2})
    assert new.startswith("node/new.py: 1 module-level numbers, 0 allowed")
