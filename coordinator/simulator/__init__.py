"""A swarm on paper under the living rules, event-driven and deterministic by seed
(:mod:`coordinator.simulator.core.swarm`), and the judgement of a placement by a short run of it
(:func:`coordinator.simulator.judge.judge`)."""
