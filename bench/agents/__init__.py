"""Clients by template families: which of them finish what agents do."""
