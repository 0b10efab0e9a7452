"""The best placement of all planners, the process that solves, advice on it."""
