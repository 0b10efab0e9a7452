"""Whole simulated runs: full load, churn, moves."""
