"""The transport interface, and what its adapters share."""
