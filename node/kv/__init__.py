"""The paged KV pool: its rows, page accounting, shared prefixes, export and import."""
