"""Adapter: hivemind's p2pd and its Kademlia."""
