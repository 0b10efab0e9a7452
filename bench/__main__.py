"""Runs a benchmark by its short name, or lists all: ``python -m bench [NAME [options]]``."""

import ast
import runpy
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def benchmarks() -> dict[str, str]:
    """Each benchmark's short name and the first line of what it says of itself."""
    found = {}
    for path in sorted(HERE.glob("*/*.py")):
        text = path.read_text()
        if 'if __name__ == "__main__"' in text:
            name = ".".join(path.relative_to(HERE).with_suffix("").parts).removesuffix(".__main__")
            said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
            found[name] = said
    return found


def main() -> int:
    """List the benchmarks, or run the one that is named; 2 where there is none of that name."""
    known = benchmarks()
    if len(sys.argv) == 1 or sys.argv[1] in {"-h", "--help"}:
        print("usage: python -m bench NAME [options]\n")
        for name, said in known.items():
            print(f"  {name}\n      {said}")
        return 0
    name = sys.argv.pop(1)
    if name not in known:
        near = get_close_matches(name, known, n=1) or [""]
        hint = f"; did you mean {near[0]}?" if near[0] else ""
        print(f"error: there is no benchmark {name!r}{hint}", file=sys.stderr)
        return 2
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
