"""Experiments on paper, by the rules that peers live by.

:func:`coordinator.commands.full_load.offline` simulates a placement under full load, ``online``
under requests with arrival times.
"""
