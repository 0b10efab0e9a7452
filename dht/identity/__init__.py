"""Peer identities, and the addresses at which peers are dialled."""
