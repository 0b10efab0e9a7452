"""The search over chains of stages: dynamic program, local moves."""
