"""Bodies of requests and answers, and the other interfaces' translations of them. Pure."""
