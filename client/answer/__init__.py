"""What a caller may ask for, and the answer in the making."""
