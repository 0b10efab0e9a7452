"""Experiments on paper: full load, arrivals, churn and moves, by the living rules or the papers'.

:func:`coordinator.experiments.full_load.offline` simulates a placement under full load, ``online``
under requests with arrival times.
"""
