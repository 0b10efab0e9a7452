"""Whole runs on paper: full load, churn, moves."""
