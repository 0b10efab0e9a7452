"""The brain: placement, plan checking, max flow, routes and election, as pure decisions."""
