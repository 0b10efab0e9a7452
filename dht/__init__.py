"""The shared types, messages and records of a swarm, and the transports between its peers."""

import os

# Before anything imports transformers, which would ask a hub for kernels and run them.
os.environ["USE_HUB_KERNELS"] = "0"
