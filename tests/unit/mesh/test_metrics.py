from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client import Counter

from mesh import metrics
from mesh.links import Counters


class _Link:
    def __init__(self, received: int) -> None:
        self.counters = Counters(received=received)


def _sample(page: bytes, name: str) -> float:
    line = next(line for line in page.decode().splitlines() if line.startswith(name + " "))
    return float(line.rsplit(" ", 1)[1])


def test_a_page_shows_the_process_and_what_was_counted() -> None:
    registry = metrics.new_registry()
    Counter("moemesh_tokens", "Tokens.", registry=registry).inc(3)
    page = metrics.page(registry)
    assert _sample(page, "moemesh_tokens_total") == 3
    assert _sample(page, "moemesh_process_resident_memory_bytes") > 0


def test_a_histogram_counts_what_is_up_to_each_bound() -> None:
    buckets = metrics.Buckets((0.5, 1.0))
    for value in (0.2, 0.5, 0.7, 3.0):
        buckets.observe(value)
    family = buckets.family("wait_seconds", "Waits.")
    assert [
        (sample.name.removeprefix("moemesh_wait_seconds"), sample.labels.get("le"), sample.value)
        for sample in family.samples
    ] == [
        ("_bucket", "0.5", 2.0),
        ("_bucket", "1.0", 3.0),
        ("_bucket", "+Inf", 4.0),
        ("_count", None, 4.0),
        ("_sum", None, 4.4),
    ]


def test_two_registries_share_nothing() -> None:
    one, two = metrics.new_registry(), metrics.new_registry()
    Counter("moemesh_tokens", "Tokens.", registry=one).inc()
    assert b"moemesh_tokens" not in metrics.page(two)


def test_links_are_exported_by_name_and_replaced_when_opened_again() -> None:
    registry = metrics.new_registry()
    metrics.export_link(registry, "planner", _Link(1))
    metrics.export_link(registry, "router-0", _Link(2))
    metrics.export_link(registry, "planner", _Link(7))
    page = metrics.page(registry)
    assert _sample(page, 'moemesh_link_messages_received_total{link="planner"}') == 7
    assert _sample(page, 'moemesh_link_messages_received_total{link="router-0"}') == 2
    assert _sample(page, 'moemesh_link_messages_undecodable_total{link="planner"}') == 0
    assert _sample(page, 'moemesh_link_handshakes_failed_total{link="router-0"}') == 0


def _get(url: str, method: str = "GET") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as got:
            return got.status, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_page_is_served_on_a_free_port(run) -> None:
    async def main() -> None:
        registry = metrics.new_registry()
        server = await metrics.serve(registry, "127.0.0.1")
        for _ in range(3):
            status, body = await asyncio.to_thread(_get, server.url)
            assert status == 200
            assert b"moemesh_process_cpu_seconds_total" in body
        assert (await asyncio.to_thread(_get, server.url, "HEAD")) == (200, b"")
        assert (await asyncio.to_thread(_get, server.url, "POST"))[0] == 405
        assert (await asyncio.to_thread(_get, server.url.replace("/metrics", "/x")))[0] == 404
        await server.close()
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(_get, server.url)

    run(main())


@pytest.mark.parametrize("nonsense", [b"", b"GET", b"\x00" * 20_000, b"\r\n\r\n"])
def test_nonsense_does_not_disturb_the_server(run, nonsense: bytes) -> None:
    async def main() -> None:
        server = await metrics.serve(metrics.new_registry(), "127.0.0.1")
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(nonsense)
        writer.write_eof()
        try:
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()
        assert (await asyncio.to_thread(_get, server.url))[0] == 200
        await server.close()

    run(main())
