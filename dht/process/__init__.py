"""What a process has of its machine: supervised parts, files of its own, and news told once."""
