"""Prometheus metrics of one process, in a registry that is handed around, never global.

API
    ``new_registry()``                            with the process's CPU and memory figures
    ``export_link(registry, name, link)``         counters of a link under label ``link``
    ``Buckets(bounds)``                           a histogram that one thread fills without a lock
    ``page(registry) -> bytes``, ``CONTENT_TYPE`` the text to serve
    ``await serve(registry, host, ports) -> MetricsServer``   ``GET /metrics``; ``.url``

Names: ``moemesh_<noun>_<unit>``, the suffixes as vLLM's. No request id is ever a label, and no
layer or expert: what is counted per layer is summed up in a few groups (``mesh.layer_groups``).
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from mesh.addresses import WILDCARDS, ports_of

PREFIX = "moemesh"
CONTENT_TYPE = CONTENT_TYPE_LATEST
_REQUEST_LIMIT_BYTES = 8192
_REQUEST_TIMEOUT_S = 5.0
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's buckets for times of whole requests and their phases."""


class Buckets:
    """Counts of values up to each of ``bounds``, which ascend. One thread observes, any reads: a
    reader may see a value's bucket a moment before its sum.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        """The histogram ``moemesh_<name>``."""
        total = 0
        buckets = []
        for bound, count in zip(self._bounds, tuple(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(bound), float(total)))
        return HistogramMetricFamily(f"{PREFIX}_{name}", text, buckets=buckets, sum_value=self._sum)


class LinkCounters(Protocol):
    """What ``mesh.links`` counts."""

    received: int
    sent: int
    undecodable: int
    unsent: int
    refused: int
    handshakes_failed: int


class Counted(Protocol):
    @property
    def counters(self) -> LinkCounters: ...


def new_registry() -> CollectorRegistry:
    # A second series beside each, which nobody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(namespace=PREFIX, registry=registry)
    return registry


class _Links(Collector):
    """Reads the links' counters when it is scraped, so that counting costs one addition."""

    def __init__(self) -> None:
        self.links: dict[str, Counted] = {}

    def collect(self) -> Iterable[Metric]:
        families = {
            field: CounterMetricFamily(f"{PREFIX}_link_messages_{field}", text, labels=["link"])
            for field, text in (
                ("received", "Messages decoded."),
                ("sent", "Messages queued for sending."),
                ("undecodable", "Messages dropped because their bytes made no sense."),
                ("unsent", "Messages not sent because the peer was gone or its queue full."),
                ("refused", "Messages dropped because the sender's key does not allow them."),
            )
        } | {
            "handshakes_failed": CounterMetricFamily(
                f"{PREFIX}_link_handshakes_failed",
                "Connections that did not come about, on account of keys or of no ZeroMQ.",
                labels=["link"],
            )
        }
        for name, link in self.links.items():
            for field, family in families.items():
                family.add_metric([name], float(getattr(link.counters, field)))
        return families.values()


def export_link(registry: CollectorRegistry, name: str, link: Counted) -> None:
    """Export a link's counters; one of the same name is replaced (a link opened again)."""
    for collector in tuple(registry._collector_to_names):  # noqa: SLF001 - no public way to ask
        if isinstance(collector, _Links):
            collector.links[name] = link
            return
    links = _Links()
    links.links[name] = link
    registry.register(links)


def page(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


class MetricsServer:
    """Serves one page. A request costs one read and one write; an idle server costs nothing."""

    def __init__(self, server: asyncio.Server, host: str) -> None:
        """``host``: as it shows in the URL."""
        self._server = server
        port = server.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}/metrics"

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


async def serve(
    registry: CollectorRegistry, host: str, ports: str = "", *, shown: str = ""
) -> MetricsServer:
    """Listen at ``host`` on the first free one of ``ports`` (``LOW-HIGH``; empty: any). Raises
    ``OSError``. The URL of a ``host`` that stands for all addresses names ``shown`` instead.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                path = rest.partition(b" ")[0].partition(b"?")[0]
                if method not in {b"GET", b"HEAD"}:
                    writer.write(_response(b"405 Method Not Allowed", b""))
                elif path != b"/metrics":
                    writer.write(_response(b"404 Not Found", b"metrics are at /metrics\n"))
                else:
                    body = page(registry)
                    writer.write(_response(b"200 OK", body if method == b"GET" else b""))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # a scraper that goes away or talks nonsense is no event of ours
        finally:
            writer.close()

    taken = OSError("no port is given")
    for port in ports_of(ports):
        try:
            server = await asyncio.start_server(answer, host, port, limit=_REQUEST_LIMIT_BYTES)
        except OSError as error:
            taken = error
        else:
            return MetricsServer(server, shown if shown and host in WILDCARDS else host)
    raise taken


def _response(status: bytes, body: bytes) -> bytes:
    head = (
        b"HTTP/1.1 " + status + b"\r\nContent-Type: " + CONTENT_TYPE.encode() + b"\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\nConnection: close\r\n\r\n"
    )
    return head + body
