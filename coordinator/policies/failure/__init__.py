"""Detection of dead peers: pings, and the failure detector."""
