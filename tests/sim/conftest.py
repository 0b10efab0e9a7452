"""What the tests of whole swarms share."""

from tests.structures import structures_are_found_once  # noqa: F401
