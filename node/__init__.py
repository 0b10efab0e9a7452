"""A volunteer's machine: joining, measuring, weights, the engine and the stage server."""
