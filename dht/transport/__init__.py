"""The transport interface, and the code that its adapters share."""
