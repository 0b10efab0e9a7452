"""Who chooses routes on paper: this project, Helix, Swarm, pipelines."""
