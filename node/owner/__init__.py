"""What the machine's owner lends, sees and wants back."""
