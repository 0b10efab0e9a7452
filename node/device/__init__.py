"""The machine and its GPU, and numbers to and from the device."""
