"""The gateway's figures for Prometheus, named after vLLM's with ``anabranch:`` for ``vllm:``."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.running = self._gauge("num_requests_running", "Answers that are being made.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for their turn.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that were answered.")
        self.cached_tokens = self._counter(
            "prefix_cache_hits", "Prompt tokens whose KV the peers had kept."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were generated.")
        self.failovers = self._counter("failovers", "Stages lost while an answer was made.")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", SECONDS
        )
        self.per_token_s = self._histogram(
            "request_time_per_output_token_seconds", "Per token after the first.", SECONDS
        )
        self.latency_s = self._histogram(
            "e2e_request_latency_seconds", "From the request to the end of its answer.", SECONDS
        )
        self.prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_size = self._histogram(
            "request_generation_tokens", "Tokens of an answer.", TOKENS
        )
        self._success = Counter(
            "anabranch:request_success",
            "Answers that were completed, by their finish reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._responses = Counter(
            "anabranch:http_responses",
            "Responses by path and status; paths that do not exist are counted together.",
            ("path", "status"),
            registry=self.registry,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"anabranch:{name}", text, ("model_name",), registry=self.registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"anabranch:{name}", text, ("model_name",), registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"anabranch:{name}", text, ("model_name",), registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name)

    def succeeded(self, finish_reason: str) -> None:
        """Count one completed answer."""
        self._success.labels(self._model_name, finish_reason).inc()

    def responded(self, path: str, status: int) -> None:
        """Count one HTTP response."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
