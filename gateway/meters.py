"""What the gateway measures, in Prometheus metrics named as vLLM's are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.metrics import PREFIX, REQUEST_SECONDS

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class _Count(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())


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
        self.request_failures = counter(
            "request_failures",
            "Admitted requests that failed, by status, also of streams that had begun.",
            "status",
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
            "e2e_request_latency_seconds",
            "From a request's arrival to its end, of requests that ended well.",
            REQUEST_SECONDS,
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds", "Without a router before the first.", REQUEST_SECONDS
        )
        for reason in ("stop", "length"):
            self.request_success.labels(reason)  # so that rates begin with the first
        for status in ("500", "503", "504"):
            self.request_failures.labels(status)

    def watch_count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter that is read when it is scraped."""
        self._registry.register(_Count(f"{PREFIX}_{name}", text, read))

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"{PREFIX}_{name}", text, registry=self._registry).set_function(read)
