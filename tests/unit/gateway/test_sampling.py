import pytest

from gateway.api import sampling as rules
from gateway.api.requests import ChatRequest, CompletionRequest, StreamOptions
from gateway.errors import ContextTooLong, InvalidType, InvalidValue

DEFAULTS = rules.Defaults(temperature=0.8, top_p=0.95, max_tokens=200)
MESSAGES = [{"role": "user", "content": "x"}]


def chat(**fields):
    return ChatRequest(messages=MESSAGES, **fields)


def completion(**fields):
    return CompletionRequest(prompt="x", **fields)


def parameters(request, max_tokens=16):
    return rules.sampling(
        request,
        max_tokens=max_tokens,
        seed=99,
        logprobs=-1,
        prompt_logprobs=-1,
        vocab_size=100,
        defaults=DEFAULTS,
    )


def budget(request, prompt_tokens=10, context=100):
    return rules.max_tokens(
        request, prompt_tokens=prompt_tokens, context=context, defaults=DEFAULTS
    )


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("n", 10**400),
        ("top_k", 10**400),
        ("min_tokens", -(10**400)),
        ("seed", 10**400),
    ],
)
def test_values_out_of_range_are_named(name, bad):
    with pytest.raises(InvalidValue, match=name) as caught:
        rules.check_ranges(completion(**{name: bad}))
    assert caught.value.param == name


def test_bounds_and_values_are_shown_as_people_write_them():
    with pytest.raises(InvalidValue, match=r"at most 2147483647, or -1, got 2147483648\."):
        rules.check_ranges(completion(top_k=2**31))
    with pytest.raises(InvalidValue, match=r"got -0\.1\."):
        rules.check_ranges(completion(top_p=-0.1))
    with pytest.raises(InvalidValue, match=r"got 90+\.\.\. \(400 characters\)\."):
        rules.check_ranges(completion(n=9 * 10**399))


@pytest.mark.parametrize("max_tokens", [10**400, -(10**400)])
def test_absurd_budgets_are_refused(max_tokens):
    with pytest.raises(InvalidValue, match="max_tokens"):
        budget(completion(max_tokens=max_tokens))


def test_continuous_usage_needs_usage():
    with pytest.raises(InvalidValue, match="include_usage") as caught:
        rules.check_ranges(
            completion(stream=True, stream_options=StreamOptions(continuous_usage_stats=True))
        )
    assert caught.value.param == "stream_options.continuous_usage_stats"


def test_the_edges_of_the_ranges_are_accepted():
    rules.check_ranges(
        completion(temperature=0, top_p=1, top_k=-1, min_p=0, n=128, presence_penalty=-2, seed=-1)
    )


def test_stream_options_need_a_stream():
    with pytest.raises(InvalidValue, match="stream_options"):
        rules.check_ranges(completion(stream_options=StreamOptions()))


def test_the_checkpoint_gives_the_defaults_and_the_client_overrides_them():
    assert parameters(chat()).temperature == 0.8
    assert parameters(chat()).top_p == 0.95
    chosen = parameters(chat(temperature=0, top_k=-1))
    assert (chosen.temperature, chosen.top_k) == (0, 0)


def test_each_choice_has_its_own_seed():
    first = parameters(chat(seed=7))
    assert [rules.for_choice(first, i).seed for i in range(3)] == [7, 8, 9]
    assert parameters(chat()).seed == 99
    assert parameters(chat(seed=-1)).seed == 2**63 - 1


def test_logit_bias_maps_token_ids():
    assert parameters(chat(logit_bias={"5": -100.0, "3": 1})).logit_bias == ((3, 1), (5, -100.0))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logit_bias": {"x": 1}}, InvalidType),
        ({"logit_bias": {" 5": 1}}, InvalidType),
        ({"logit_bias": {"1_0": 1}}, InvalidType),
        ({"logit_bias": {"05": 1}}, InvalidType),
        ({"logit_bias": {"-1": 1}}, InvalidType),
        ({"logit_bias": {"\u0665": 1}}, InvalidType),
        ({"logit_bias": {"9" * 5000: 1}}, InvalidType),
        ({"logit_bias": {"100": 1}}, InvalidValue),
        ({"logit_bias": {"1": 101}}, InvalidValue),
        ({"stop_token_ids": [100]}, InvalidValue),
        ({"min_tokens": 17}, InvalidValue),
    ],
)
def test_values_that_depend_on_the_model_are_checked(fields, error):
    with pytest.raises(error) as caught:
        parameters(chat(**fields))
    assert caught.value.param == next(iter(fields))


def test_output_defaults_differ_between_the_endpoints():
    assert budget(completion()) == 16
    assert budget(chat()) == 90
    assert budget(chat(), context=1000) == 200
    assert budget(completion(), prompt_tokens=95) == 5


def test_zero_tokens_reach_the_router():
    # One token more would not fit behind a prompt that fills the context.
    assert parameters(completion(max_tokens=0, echo=True), max_tokens=0).max_tokens == 0


def test_max_completion_tokens_wins():
    assert budget(chat(max_tokens=3, max_completion_tokens=5)) == 5


def test_zero_tokens_are_for_echo_only():
    assert budget(completion(max_tokens=0, echo=True), prompt_tokens=100) == 0
    for request in (completion(max_tokens=0), chat(max_tokens=0)):
        with pytest.raises(InvalidValue, match="max_tokens"):
            budget(request)


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "param"),
    [
        (chat(max_tokens=91), 10, "max_tokens"),
        (chat(max_completion_tokens=91), 10, "max_completion_tokens"),
        (chat(), 100, "messages"),
        (completion(), 101, "prompt"),
        (completion(max_tokens=0, echo=True), 101, "prompt"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(request_, prompt_tokens, param):
    with pytest.raises(ContextTooLong, match="100") as caught:
        budget(request_, prompt_tokens=prompt_tokens)
    assert caught.value.param == param


def test_stop_strings_take_both_forms():
    assert rules.stop_strings(chat(stop="x")) == ("x",)
    assert rules.stop_strings(chat(stop=["x", "y"])) == ("x", "y")
    for bad in ("", ["a", ""], ["x"] * 17):
        with pytest.raises(InvalidValue, match="stop"):
            rules.stop_strings(chat(stop=bad))
