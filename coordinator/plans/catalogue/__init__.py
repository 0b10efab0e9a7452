"""Which models a network serves, and which of them needs a volunteer the most."""
