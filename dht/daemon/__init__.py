"""The transport adapter over hivemind's p2pd daemon and its Kademlia DHT."""
