"""The gateway: OpenAI's HTTP interface in front of a swarm, for programs that speak it already.

``python -m client.gateway`` runs it; see docs/gateway.md.
"""
