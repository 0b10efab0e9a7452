"""The papers' experiments as named recipes, each with the paper's figure beside ours.

``python -m bench.papers`` runs all of them and makes ``docs/results.md``.
"""
