"""How a process finds a network: invitations, the local network, lists, and what was used last."""
