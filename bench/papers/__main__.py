"""Run the recipes, renew the documents (``bench.results_table``).

``python -m bench.papers`` runs all that has no result yet, writes
``bench/results/papers/<recipe>.json`` line by line (a run that was stopped goes on there) and
renews the documents. ``python -m bench.papers helix-offline-70b …`` runs some; ``--list`` says what
there is; ``--again`` keeps no result.
"""

import os
import sys
from collections.abc import Sequence

from bench import results_table
from bench.papers import jobs
from bench.papers.recipes import RECIPES
from bench.report import parser_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = parser_of("bench.papers", __doc__, writes=False)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="which; all without any")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--again", action="store_true", help="keep no result")
    parser.add_argument(
        "--any-age", action="store_true", help="keep results of other versions of the code, too"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, recipe in RECIPES.items():
            print(f"{name}: {recipe.title}")
        return 0
    names = [] if arguments.recipes == ["all"] else arguments.recipes
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        print(f"error: no recipe {unknown[0]}; there are {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    chosen = [RECIPES[name] for name in names or RECIPES]
    failed = jobs.run(chosen, arguments.processes, again=arguments.again, any_age=arguments.any_age)
    results_table.main()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
