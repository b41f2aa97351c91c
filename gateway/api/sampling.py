"""From a request's fields to ``mesh.messages.Sampling``: ranges, defaults, token budget. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.requests import ChatRequest, CompletionRequest
from gateway.errors import ContextTooLong, InvalidType, InvalidValue, shown
from mesh.messages import SEED_MASK, Sampling

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOKEN_ENTRIES = 1024
"""Of ``logit_bias`` and ``stop_token_ids``: looked at again for every token."""
_DEFAULT_COMPLETION_TOKENS = 16
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")


class Range(msgspec.Struct, frozen=True):
    """Accepted values of a number: ``low`` to ``high``, or -1 where ``or_minus_one``."""

    low: float
    high: float
    low_open: bool = False
    or_minus_one: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``InvalidValue`` naming ``name`` unless ``value`` is accepted."""
        if self.or_minus_one and value == -1:
            return
        # Comparisons only: NaN fails them, and integers may be too large for a float.
        low_ok = value > self.low if self.low_open else value >= self.low
        if not (low_ok and value <= self.high):
            bound = f"more than {self.low}" if self.low_open else f"at least {self.low}"
            also = ", or -1" if self.or_minus_one else ""
            raise InvalidValue(
                f"{name} must be {bound} and at most {self.high}{also}, got {shown(value)}.",
                param=name,
            )


RANGES: Mapping[str, Range] = {
    "n": Range(1, MAX_CHOICES),
    "best_of": Range(1, MAX_CHOICES),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, low_open=True),
    "top_k": Range(0, 2**31 - 1, or_minus_one=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, low_open=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "min_tokens": Range(0, 2**31 - 1),
    "seed": Range(-(2**63), 2**63 - 1),
    "priority": Range(-(2**31), 2**31 - 1),
    "top_logprobs": Range(0, MAX_LOGPROBS),
    "max_completion_tokens": Range(1, 2**31 - 1),
}
LOGIT_BIAS_RANGE = Range(-100, 100)


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint's ``generation_config.json`` recommends, else the neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """Output tokens of a chat that does not say; None: to the end of the context."""


def check_ranges(request: CompletionRequest | ChatRequest) -> None:
    """Raise ``InvalidValue`` naming the first number that is out of its range."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is not None and name in RANGES:
            RANGES[name].check(name, value)
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise InvalidValue("stream_options needs stream=true.", param="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        raise InvalidValue(
            "stream_options.continuous_usage_stats needs include_usage=true.",
            param="stream_options.continuous_usage_stats",
        )


def stop_strings(request: CompletionRequest | ChatRequest) -> tuple[str, ...]:
    """``stop`` as a tuple; raises ``InvalidValue`` for empty or long strings, or too many."""
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidValue(f"stop takes at most {MAX_STOPS} strings.", param="stop")
    if "" in stops:
        raise InvalidValue("stop must not hold an empty string.", param="stop")
    if any(len(one) > MAX_STOP_CHARACTERS for one in stops):
        raise InvalidValue(
            f"stop takes strings of at most {MAX_STOP_CHARACTERS} characters.", param="stop"
        )
    return stops


def max_tokens(
    request: CompletionRequest | ChatRequest,
    *,
    prompt_tokens: int,
    context: int,
    defaults: Defaults,
) -> int:
    """How many tokens a sequence of this request may produce.

    ``context``: tokens that prompt and output may have together. 0 is accepted only from
    ``echo``. Raises ``InvalidValue`` or ``ContextTooLong``.
    """
    room = context - prompt_tokens
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    asked, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, name = request.max_completion_tokens, "max_completion_tokens"
    for limit in (name, "max_tokens"):
        if (value := getattr(request, limit)) is not None:
            Range(0 if echo else 1, 2**31 - 1).check(limit, value)
    if room < 0 or (room == 0 and asked != 0):
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens; "
            f"the prompt alone has {prompt_tokens}.",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    if asked is None:
        if isinstance(request, CompletionRequest):
            return min(_DEFAULT_COMPLETION_TOKENS, room)
        return min(defaults.max_tokens or room, room)
    if asked > room:
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens; you asked for "
            f"{prompt_tokens + asked} ({prompt_tokens} in the prompt, {asked} of output).",
            param=name,
        )
    return asked


def sampling(
    request: CompletionRequest | ChatRequest,
    *,
    max_tokens: int,
    seed: int,
    logprobs: int,
    prompt_logprobs: int,
    vocab_size: int,
    defaults: Defaults,
) -> Sampling:
    """The router's sampling parameters for the request's first choice.

    ``max_tokens``: 0 only scores the prompt. ``seed``: used when the request has none.
    ``logprobs``, ``prompt_logprobs``: as in ``Sampling``. Raises ``InvalidValue`` or
    ``InvalidType`` for what ``check_ranges`` cannot see.
    """
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidValue(
            f"min_tokens must be at most max_tokens ({max_tokens}), got {min_tokens}.",
            param="min_tokens",
        )
    stop_token_ids = tuple(request.stop_token_ids or ())
    _check_count(len(stop_token_ids), "stop_token_ids")
    for token in stop_token_ids:
        _check_token(token, vocab_size, "stop_token_ids")
    return Sampling(
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=(seed if request.seed is None else request.seed) & SEED_MASK,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def for_choice(first: Sampling, choice: int) -> Sampling:
    """The parameters of the request's ``choice``-th sequence: another seed, all else equal."""
    if choice == 0:
        return first
    return msgspec.structs.replace(first, seed=(first.seed + choice) & SEED_MASK)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_count(entries: int, name: str) -> None:
    if entries > MAX_TOKEN_ENTRIES:
        raise InvalidValue(
            f"{name} takes at most {MAX_TOKEN_ENTRIES} tokens, got {entries}.", param=name
        )


def _check_token(token: int, vocab_size: int, name: str) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidValue(
            f"{name}: token id {shown(token)} is not in the vocabulary (0 to {vocab_size - 1}).",
            param=name,
        )


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    _check_count(len(bias or ()), "logit_bias")
    for key, value in (bias or {}).items():
        if not TOKEN_ID.fullmatch(key):
            raise InvalidType(
                f"logit_bias: keys are token ids, got {shown(repr(key))}.", param="logit_bias"
            )
        token = int(key)
        _check_token(token, vocab_size, "logit_bias")
        LOGIT_BIAS_RANGE.check("logit_bias", value)
        pairs.append((token, value))
    return tuple(sorted(pairs))
