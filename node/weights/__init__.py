"""Weight files: found, fetched, checked against hashes, read tensor by tensor."""
