"""The paged KV pool: its rows, who holds which pages, shared prefixes, export and import."""
