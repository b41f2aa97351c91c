"""Clients that stream seeded completions from a real mesh and compare every token with a reference.

In exact mode a request with a seed has one right answer, whatever happens to the mesh meanwhile.
So a client needs no model to know that a token is wrong, and no token may be missing or repeated.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.meshes import Mesh

TIMEOUT_S = 120.0
_SOON_S = 0.5
"""Tokens that were on their way when a process died still come; the pause begins after them."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt of ``prompt_tokens`` drawn by ``seed``, and how much to say to it."""

    seed: int
    prompt_tokens: int
    max_tokens: int

    def body(self) -> bytes:
        draw = random.Random(self.seed)
        body = {
            "prompt": [draw.randrange(8, 380) for _ in range(self.prompt_tokens)],
            "max_tokens": self.max_tokens, "seed": self.seed, "temperature": 0.8,
            "ignore_eos": True, "logprobs": 0, "stream": True,
        }  # fmt: skip
        return json.dumps(body).encode()


@dataclass
class Answer:
    """What came for an ``Ask``, and when: monotonic seconds of the request and of each token."""

    ask: Ask
    began: float
    tokens: list[tuple[str, float]] = field(default_factory=list)
    """Text and log-probability."""
    arrivals: list[float] = field(default_factory=list)
    cancelled: bool = False

    def pause_s(self, since: float) -> float | None:
        """The longest time without a token that began before ``since`` or just after it, from
        ``since`` on; None for an answer that was over by then, or had no token yet.
        """
        if not self.arrivals or not self.arrivals[0] < since < self.arrivals[-1]:
            return None
        return max(
            later - max(sooner, since)
            for sooner, later in itertools.pairwise(self.arrivals)
            if later >= since and sooner <= since + _SOON_S
        )


class Lost(AssertionError):
    """A request that did not end as it should."""

    def __init__(self, answer: Answer, words: str) -> None:
        age_s = time.monotonic() - answer.began
        tokens = len(answer.tokens)
        super().__init__(
            f"{answer.ask}: {words}, with {tokens} tokens, {age_s:.1f} s after it began"
        )


def stream(port: int, answer: Answer, *, most_tokens: int) -> None:
    """Fill in the whole answer; after ``most_tokens`` the client hangs up. Raises ``Lost``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", answer.ask.body(), headers)
        response = connection.getresponse()
        if response.status != 200:
            said = response.read().decode(errors="replace")
            raise Lost(answer, f"status {response.status} {said}")
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Lost(answer, f"{chunk['error']}")
                _take(answer, chunk["choices"][0])
                answer.cancelled = len(answer.tokens) >= most_tokens
                if answer.cancelled:
                    return
            elif line.startswith(b"data: [DONE]"):
                return
    except (OSError, http.client.HTTPException) as error:
        raise Lost(answer, repr(error)) from error
    finally:
        connection.close()
    raise Lost(answer, "the stream broke off")


def _take(answer: Answer, choice: dict[str, Any]) -> None:
    if (logprobs := choice["logprobs"]) is not None:
        new = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
        answer.tokens += new
        answer.arrivals += [time.monotonic()] * len(new)


def asks(seed: int, count: int, prompt_tokens: int, max_tokens: int) -> list[Ask]:
    """``count`` requests of about that size, all different."""
    draw = random.Random(seed)
    return [
        Ask(
            seed * 10_000 + index,
            max(1, round(prompt_tokens * draw.uniform(0.7, 1.0))),
            max(1, round(max_tokens * draw.uniform(0.7, 1.0))),
        )
        for index in range(count)
    ]


class Reference:
    """What each request is answered with on a mesh that nothing happens to."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[Ask, list[tuple[str, float]]] = {}

    def learn(self, wanted: Iterable[Ask], threads: int = 4) -> None:
        """Ask for those that are not known yet; nothing may disturb the mesh meanwhile."""
        new = [ask for ask in wanted if ask not in self._known]
        ports = [self._mesh.port]
        with Clients(ports, new, threads, reference=None, most=len(new)) as clients:
            clients.join()
        if clients.failures:
            raise clients.failures[0]
        for answer in clients.answers:
            assert len(answer.tokens) == answer.ask.max_tokens, answer
            self._known[answer.ask] = answer.tokens

    def check(self, answer: Answer) -> None:
        want = self._known[answer.ask]
        if answer.cancelled:
            want = want[: len(answer.tokens)]
        if answer.tokens != want:
            at = next(
                (i for i, (a, b) in enumerate(zip(answer.tokens, want, strict=False)) if a != b),
                min(len(answer.tokens), len(want)),
            )
            got = answer.tokens[at : at + 2]
            raise Lost(answer, f"from token {at} of {len(want)} on {got} for {want[at : at + 2]}")


class Clients:
    """``count`` clients that stream one of ``choices`` after another until the end of ``with``; the
    i-th at the i-th of ``ports``, over and over. They make ``most`` requests. With ``cancels``, a
    share of these is cancelled on the way, chosen by ``seed``.

    ``failures`` are the requests that were lost or wrong. One that was lost at a port of
    ``excused`` is only noted in ``broken``, and asked again.
    """

    def __init__(
        self,
        ports: Sequence[int],
        choices: Sequence[Ask],
        count: int,
        *,
        reference: Reference | None,
        cancels: float = 0.0,
        seed: int = 0,
        most: float = float("inf"),
    ) -> None:
        self.answers: list[Answer] = []
        self.open: dict[int, Answer] = {}
        """Client -> what it is being told."""
        self.failures: list[Exception] = []
        self.broken: list[Lost] = []
        self.excused: set[int] = set()
        self._ports = ports
        self._choices = choices
        self._reference = reference
        self._cancels = cancels
        self._seed = seed
        self._next = itertools.count()
        self._limit = most
        self._threads = [
            threading.Thread(target=self._run, args=(index, ports[index % len(ports)]))
            for index in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._limit = 0
        self.join()

    def join(self) -> None:
        """Until the clients have made their ``most`` requests."""
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a request neither ended nor failed"

    def flowing(self) -> int:
        """How many clients are being told something."""
        return sum(bool(answer.tokens) for answer in tuple(self.open.values()))

    def waiting(self) -> int:
        """How many clients wait for their first token."""
        return sum(not answer.tokens for answer in tuple(self.open.values()))

    def pauses_s(self, since: float) -> list[float]:
        """Of each stream that was on its way then: how long it stood still at most."""
        both = [*self.answers, *self.open.values()]
        return [p for answer in both if (p := answer.pause_s(since)) is not None]

    def _run(self, client: int, port: int) -> None:
        draw = random.Random(self._seed * 1000 + client)
        again: Ask | None = None
        while True:
            turn = next(self._next)
            if turn >= self._limit:
                return
            ask = again or self._choices[turn % len(self._choices)]
            cancels = draw.random() < self._cancels
            most = draw.randrange(1, ask.max_tokens) if cancels and ask.max_tokens > 1 else 1 << 30
            again = None
            answer = self.open[client] = Answer(ask, time.monotonic())
            try:
                stream(port, answer, most_tokens=most)
                if self._reference is not None:
                    self._reference.check(answer)
                self.answers.append(answer)
            except Lost as lost:
                if port in self.excused:
                    self.broken.append(lost)
                    again = ask
                else:
                    self.failures.append(lost)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.failures.append(error)
                return
            finally:
                del self.open[client]
