"""What the commands are made of: files of swarms, and simulated runs by the rules of live peers.

:func:`coordinator.commands.full_load.offline` simulates a placement under full load, ``online``
under requests with arrival times.
"""
