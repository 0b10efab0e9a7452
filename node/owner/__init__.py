"""The machine's owner: what they lend, what they see, when they want the machine back."""
