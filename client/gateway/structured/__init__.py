"""Answers with a structure: grammars that they follow, calls and thoughts read in them. Pure."""
