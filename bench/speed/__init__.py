"""How fast answers come: one machine, engines, links, prefixes, drafts, overload."""
