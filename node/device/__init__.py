"""The machine and its GPU, and transfers to and from the device."""
