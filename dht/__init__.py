"""The shared language of an Anabranch swarm and the ways in which its peers reach each other."""
