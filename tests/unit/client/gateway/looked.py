"""A text for tests that bound how often something is looked for."""


class Looked(str):
    """A text that counts how often texts of its kind are compared."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Looked.looks += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__
