"""The best placement of all planners, the process that solves, the order of moves."""
