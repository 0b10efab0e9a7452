"""The election of the coordinator: leases, and the shell that stores them."""
