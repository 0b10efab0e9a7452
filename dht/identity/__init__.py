"""Who a peer is, and where it is dialled."""
