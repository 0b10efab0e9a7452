"""A volunteer's machine: joining, measuring, weights, the engine and the stage server."""

VERSION = "0.1.0"
