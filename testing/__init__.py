"""What tests and benchmarks share: clock, network, engines that wait, swarms, small models."""
