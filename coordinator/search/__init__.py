"""The search over chains of stages: dynamic program, patterns, local moves."""
