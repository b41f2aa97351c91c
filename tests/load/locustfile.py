"""Load on an OpenAI-compatible mesh, by locust.

    locust -f tests/load/locustfile.py --headless -H http://127.0.0.1:8000 -u 9 -t 2m

Two kinds of clients share a run. ``ClosedLoop`` users ask, read the whole stream, think, and ask
again; some hang up on the way. ``OpenLoop`` is one user whose requests arrive at ``--rate`` a
second whether or not earlier ones were answered, which is what shows a queue that grows. Prompts
are openings in the manner of the shipped model's topics, whose mix drifts over the run, in three
lengths. Users take turns with the API keys.

Beside the requests, locust's statistics have times of their own: ``TTFT`` to the first token,
``ITL`` between two tokens, ``E2E`` to the end, and how many requests kept the bounds
(``SLO met``, whose requests/s are the goodput) or not (``SLO missed``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import requests
from gevent.pool import Pool
from locust import User, between, events, task

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from topics import prompt

TIMEOUT_S = 120.0
MOST_OPEN = 64
"""Open requests of the open loop. One that would be beyond is counted as dropped, and fails."""
LENGTHS = {"short": (1, 1), "medium": (3, 6), "long": (10, 16)}
"""How many openings a prompt is made of."""
SHARES = (6, 3, 1)


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--api-keys", default="", is_secret=True, help="keys by commas")
    parser.add_argument("--rate", type=float, default=1.0, help="open loop: requests a second")
    parser.add_argument("--drift", type=float, default=120.0, help="seconds of the topics' drift")
    parser.add_argument("--slo-ttft", type=float, default=2000.0, help="ms to the first token")
    parser.add_argument("--slo-itl", type=float, default=250.0, help="ms between tokens, mean")
    parser.add_argument("--draw", type=int, default=1, help="seed of prompts and arrivals")


class Refused(Exception):
    """429: the queue is full, or the key's limit is reached. ``wait_s``: of Retry-After."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"refused for {wait_s:g} s")
        self.wait_s = wait_s


class Client:
    """One client's requests, with a key, into locust's statistics."""

    def __init__(self, environment: Any, key: str) -> None:
        self.environment = environment
        self.session = requests.Session()
        self.key = key

    def ask(self, name: str, path: str, body: dict[str, Any], hang_up_after: int = 0) -> None:
        """Stream an answer; after ``hang_up_after`` chunks (0: never) the client hangs up.

        Raises ``Refused``. Every other failure is in the statistics.
        """
        options = self.environment.parsed_options
        started = last = time.perf_counter()
        gaps: list[float] = []
        ttft_ms = 0.0
        size = 0
        error: Exception | None = None
        try:
            for chunk in self._chunks(path, body):
                now = time.perf_counter()
                size += len(chunk)
                if ttft_ms:
                    gaps.append((now - last) * 1000)
                else:
                    ttft_ms = (now - started) * 1000
                last = now
                if hang_up_after and len(gaps) + 1 >= hang_up_after:
                    self._note("CANCELLED", name, (now - started) * 1000, size)
                    return
        except Refused:
            self._note("REFUSED", name, (time.perf_counter() - started) * 1000, 0)
            raise
        except Exception as caught:  # noqa: BLE001 - whatever it is, the statistics name it
            error = caught
        self._note("E2E", name, (time.perf_counter() - started) * 1000, size, error)
        if error is not None:
            return
        self._note("TTFT", name, ttft_ms, 0)
        for gap in gaps:
            self._note("ITL", name, gap, 0)
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        met = ttft_ms <= options.slo_ttft and mean <= options.slo_itl
        self._note("SLO met" if met else "SLO missed", "all", (last - started) * 1000, 0)

    def _chunks(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """The data of chunks with text; raises for an answer that is none, or not whole."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = self.environment.host + path
        # A session's own ``verify`` gives way to REQUESTS_CA_BUNDLE.
        with self.session.post(
            url, json=body, headers=headers, stream=True, timeout=TIMEOUT_S, verify=False
        ) as answer:
            if answer.status_code == 429:
                raise Refused(float(answer.headers.get("Retry-After", "1")))
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}: {answer.text[:200]}")
            finish = None
            usage: dict[str, int] = {}
            for line in answer.iter_lines(chunk_size=None):
                if line == b"data: [DONE]":
                    if finish not in {"stop", "length"}:
                        raise ValueError(f"the stream ended with {finish}")
                    if not 0 < usage.get("completion_tokens", 0) <= body["max_tokens"]:
                        raise ValueError(f"the stream's usage is {usage}")
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"an error event: {event['error']['message'][:200]}")
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    finish = choice["finish_reason"] or finish
                    yield line
            raise ValueError("the stream broke off")

    def _note(
        self, kind: str, name: str, ms: float, size: int, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=ms, response_length=size,
            exception=error, context={},
        )  # fmt: skip


class Asker(User):
    """What both kinds of users ask for."""

    abstract = True
    _numbers = itertools.count()

    def on_start(self) -> None:
        options = self.environment.parsed_options
        number = next(Asker._numbers)
        self.rng = random.Random(f"{options.draw}-{number}")
        self.begun = time.perf_counter()
        keys = options.api_keys.split(",")
        self.clients = [
            Client(self.environment, keys[(number + i) % len(keys)]) for i in range(len(keys))
        ]

    def question(self) -> tuple[str, str, dict[str, Any]]:
        """Name for the statistics, path and body."""
        rng = self.rng
        (length,) = rng.choices(list(LENGTHS), SHARES)
        share = min(1.0, (time.perf_counter() - self.begun) / self.environment.parsed_options.drift)
        text = "\n\n".join(prompt(rng, share) for _ in range(rng.randint(*LENGTHS[length])))
        body = {
            "max_tokens": rng.randint(4, 40), "temperature": 0.8, "seed": rng.randrange(1 << 30),
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if rng.random() < 0.3:
            messages = [{"role": "user", "content": text}]
            return f"chat {length}", "/v1/chat/completions", body | {"messages": messages}
        return f"completion {length}", "/v1/completions", body | {"prompt": text}


class ClosedLoop(Asker):
    """Asks again some time after the answer."""

    weight = 1
    wait_time = between(0.05, 0.5)

    @task(9)
    def read_all(self) -> None:
        self._ask(hang_up_after=0)

    @task(1)
    def hang_up(self) -> None:
        self._ask(hang_up_after=self.rng.randint(1, 4))

    def _ask(self, hang_up_after: int) -> None:
        try:
            self.clients[0].ask(*self.question(), hang_up_after=hang_up_after)
        except Refused as refused:
            gevent.sleep(refused.wait_s)


class OpenLoop(Asker):
    """Requests that arrive as a Poisson process."""

    fixed_count = 1

    def on_start(self) -> None:
        super().on_start()
        self.open = Pool(MOST_OPEN)
        self.due = self.begun
        self.turns = itertools.cycle(self.clients)

    def wait_time(self) -> float:
        """Until the next one is due: one that was delayed delays none of those after it."""
        self.due += self.rng.expovariate(self.environment.parsed_options.rate)
        return max(0.0, self.due - time.perf_counter())

    @task
    def arrive(self) -> None:
        client = next(self.turns)
        if self.open.free_count():
            self.open.spawn(self._ask, client, *self.question())
        else:
            client._note("E2E", "dropped", 0.0, 0, ValueError(f"{MOST_OPEN} were open already"))

    def _ask(self, client: Client, name: str, path: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(Refused):  # nobody tries again in an open loop
            client.ask(f"open {name}", path, body)

    def on_stop(self) -> None:
        self.open.join(timeout=TIMEOUT_S)
