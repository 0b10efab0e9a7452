"""The gateway's figures for Prometheus, named after vLLM's with ``anabranch:`` for ``vllm:``."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ModelMetrics:
    def __init__(self, metrics: "Metrics", model_name: str) -> None:
        labelled = {name: each.labels(model_name) for name, each in metrics.by_model.items()}
        self.running: Gauge = labelled["num_requests_running"]
        self.waiting: Gauge = labelled["num_requests_waiting"]
        self.prompt_tokens: Counter = labelled["prompt_tokens"]
        self.cached_tokens: Counter = labelled["prefix_cache_hits"]
        self.generation_tokens: Counter = labelled["generation_tokens"]
        self.drafted_tokens: Counter = labelled["spec_decode_num_accepted_tokens"]
        self.failovers: Counter = labelled["failovers"]
        self.first_token_s: Histogram = labelled["time_to_first_token_seconds"]
        self.per_token_s: Histogram = labelled["request_time_per_output_token_seconds"]
        self.latency_s: Histogram = labelled["e2e_request_latency_seconds"]
        self.prompt_size: Histogram = labelled["request_prompt_tokens"]
        self.answer_size: Histogram = labelled["request_generation_tokens"]
        self._success = metrics.success
        self._model_name = model_name

    def succeeded(self, finish_reason: str) -> None:
        """Count one completed answer."""
        self._success.labels(self._model_name, finish_reason).inc()


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.by_model: dict[str, Any] = {}
        """The collectors that are labelled by model, by name."""
        self._of_model(Gauge, "num_requests_running", "Answers that are being made.")
        self._of_model(Gauge, "num_requests_waiting", "Answers that wait for their turn.")
        self._of_model(Counter, "prompt_tokens", "Prompt tokens that were answered.")
        self._of_model(Counter, "prefix_cache_hits", "Prompt tokens whose KV the peers had kept.")
        self._of_model(Counter, "generation_tokens", "Tokens that were generated.")
        self._of_model(
            Counter, "spec_decode_num_accepted_tokens", "Generated tokens that peers had drafted."
        )
        self._of_model(Counter, "failovers", "Stages lost while an answer was made.")
        for name, text, buckets in (
            ("time_to_first_token_seconds", "From the request to its first token.", SECONDS),
            ("request_time_per_output_token_seconds", "Per token after the first.", SECONDS),
            ("e2e_request_latency_seconds", "From the request to the end of its answer.", SECONDS),
            ("request_prompt_tokens", "Tokens of a prompt.", TOKENS),
            ("request_generation_tokens", "Tokens of an answer.", TOKENS),
        ):
            self._of_model(Histogram, name, text, buckets=buckets)
        self.success = self._counter(
            "request_success",
            "Answers that were completed, by their finish reason.",
            "model_name",
            "finished_reason",
        )
        self._responses = self._counter(
            "http_responses",
            "Responses by path and status; paths that do not exist are counted together.",
            "path",
            "status",
        )
        self._key_responses = self._counter(
            "key_responses", "Responses by key and status.", "key", "status"
        )
        self._key_tokens = {
            "prompt": self._counter("key_prompt_tokens", "Prompt tokens by key.", "key"),
            "generation": self._counter("key_generation_tokens", "Generated tokens by key.", "key"),
        }

    def _of_model(self, kind: Any, name: str, text: str, **named: Any) -> None:
        self.by_model[name] = kind(
            f"anabranch:{name}", text, ("model_name",), registry=self.registry, **named
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"anabranch:{name}", text, labels, registry=self.registry)

    def used(self, key: str, status: int, prompt_tokens: int, generated_tokens: int) -> None:
        """Count a response to a key, by its name, and what that cost."""
        self._key_responses.labels(key, str(status)).inc()
        self._key_tokens["prompt"].labels(key).inc(prompt_tokens)
        self._key_tokens["generation"].labels(key).inc(generated_tokens)

    def of(self, model_name: str) -> ModelMetrics:
        """The figures of a model that this gateway serves; others' names are not asked for."""
        return ModelMetrics(self, model_name)

    def responded(self, path: str, status: int) -> None:
        """Count one HTTP response."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
