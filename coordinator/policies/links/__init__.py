"""One link: send order, credits, bandwidth estimate, token bucket, chunk size."""
