"""Weight files: finding, fetching, checking against hashes, reading tensor by tensor."""
