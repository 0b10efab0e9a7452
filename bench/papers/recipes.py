"""The recipes by their names, in the order of docs/results.md."""

from bench.papers import helix, links, llumnix

RECIPES = {recipe.name: recipe for recipe in (*helix.RECIPES, *links.RECIPES, *llumnix.RECIPES)}
