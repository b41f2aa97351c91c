"""What the gateway measures, in Prometheus metrics named as vLLM's are."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mesh.metrics import PREFIX

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Meters:
    """The gateway's counters and histograms, registered in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=registry)

        self.http_requests = counter(
            "http_requests", "HTTP requests answered.", "endpoint", "status"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens produced for clients.")
        self.request_success = counter(
            "request_success", "Sequences that ended well, by reason.", "finished_reason"
        )
        self.disconnects = counter(
            "request_disconnects", "Requests whose client left before their end."
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to a first token.", _TTFT_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _INTER_TOKEN_S
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", _E2E_S
        )

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"{PREFIX}_{name}", text, registry=self._registry).set_function(read)
