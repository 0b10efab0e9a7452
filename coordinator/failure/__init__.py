"""Who is alive: pings, and the failure detector."""
