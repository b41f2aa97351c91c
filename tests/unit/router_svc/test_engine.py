"""The engine against the one-process model, exact: same tokens, whatever happens on the way."""

from __future__ import annotations

import random

import pytest
import torch

from mesh.messages import Sampling
from moe_model.kv_cache import KVCache
from moe_model.model import RouterModel
from moe_model.reference import ReferenceModel
from moe_model.shipped import checkpoint_dir
from router_svc.profile import TimedModel


def prompts(count: int, longest: int = 60, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 3000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


_EXPECTED: dict[tuple[int, ...], list[int]] = {}


def expected(reference: ReferenceModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens; the longest answer to each prompt is computed once."""
    known = _EXPECTED.get(tuple(prompt), [])
    if len(known) < max_tokens:
        known = list(reference.generate(prompt, max_tokens, ignore_eos=True))
        _EXPECTED[tuple(prompt)] = known
    return known[:max_tokens]


def all_is_free(mesh) -> None:
    mesh.wait(lambda: mesh.engine.state.running + mesh.engine.state.waiting == 0)
    state = mesh.engine.state
    assert state.kv_blocks_free == state.kv_blocks_total
    # A worker may still answer a part that nobody waits for any more.
    mesh.wait(lambda: mesh.engine.state.lane_slots_in_use == 0)


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        ("a", {}),
        ("abc", {}),
        ("ab", {"micro_batches": "2"}),
        ("abc", {"micro_batches": "3", "capacity_tokens": 5}),
        ("a", {"micro_batches": "auto", "max_step_tokens": 7}),
        ("ab", {"prefix_cache": False, "block_size": 4}),
        ("a", {"max_running": 2, "kv_cache_bytes": 1}),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_reference(start_engine, reference, settings, workers) -> None:
    if settings.get("kv_cache_bytes"):  # five blocks: one sequence and a half
        block = reference.model.kv_bytes_per_block(16)
        settings = {**settings, "kv_cache_bytes": 5 * block}
    mesh = start_engine(**settings)
    mesh.start_workers(*workers)
    asked = prompts(5)
    for i, prompt in enumerate(asked):
        mesh.submit(str(i), prompt, max_tokens=12)
    for prompt, sequence in zip(asked, mesh.finish(), strict=True):
        assert sequence.tokens == expected(reference, prompt, 12)
        assert sequence.finish == "length"
    all_is_free(mesh)


def test_preemption_changes_no_token(start_engine, reference) -> None:
    block = reference.model.kv_bytes_per_block(4)
    mesh = start_engine(block_size=4, kv_cache_bytes=12 * block)
    mesh.start_workers("a")
    asked = prompts(3, longest=12)
    for i, prompt in enumerate(asked):
        mesh.submit(str(i), prompt, max_tokens=24)
    for prompt, sequence in zip(asked, mesh.finish(), strict=True):
        assert sequence.tokens == expected(reference, prompt, 24)
    assert mesh.engine.state.preemptions > 0
    all_is_free(mesh)


def test_a_known_prefix_is_reused_and_changes_nothing(start_engine, reference) -> None:
    mesh = start_engine()
    mesh.start_workers("a", "b")
    prompt = prompts(1, 60, seed=4)[0] + list(range(100, 140))
    for name in ("cold", "warm"):
        mesh.submit(name, prompt, max_tokens=8)
        mesh.finish(name)
    cold, warm = mesh.finish()
    assert cold.tokens == warm.tokens == expected(reference, prompt, 8)
    assert cold.deltas[0].cached_tokens == 0
    assert warm.deltas[0].cached_tokens == (len(prompt) - 1) // 16 * 16


def test_sampling_depends_on_seed_and_position_not_on_company(start_engine) -> None:
    mesh = start_engine(micro_batches="2")
    mesh.start_workers("a")
    prompt = [5, 6, 7]
    hot = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 16}
    mesh.submit("alone", prompt, seed=11, **hot)
    mesh.finish("alone")
    for i, other in enumerate(prompts(6)):
        mesh.submit(f"noise{i}", other, seed=i, **hot)
    mesh.submit("again", prompt, seed=11, **hot)
    mesh.submit("other seed", prompt, seed=12, **hot)
    mesh.finish()
    alone = mesh.sequences["alone"].tokens
    assert mesh.sequences["again"].tokens == alone
    assert mesh.sequences["other seed"].tokens != alone
    mesh.submit("moved", prompt, seed=11, output=alone[:5], **hot)  # another router began it
    assert mesh.finish("moved")[0].tokens == alone[5:]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 1.3},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_draws_are_those_of_the_reference(start_engine, reference, how) -> None:
    mesh = start_engine(max_step_tokens=50)
    mesh.start_workers("a", "b")
    asked = prompts(4)
    for seed, prompt in enumerate(asked):
        mesh.submit(str(seed), prompt, max_tokens=24, seed=seed, **how)
    for seed, (prompt, sequence) in enumerate(zip(asked, mesh.finish(), strict=True)):
        sampling = Sampling(seed=seed, **how)
        want = list(reference.generate(prompt, 24, sampling=sampling, ignore_eos=True))
        assert sequence.tokens == want
        assert want != expected(reference, prompt, 24)


def test_logprobs_and_prompt_logprobs(start_engine, reference) -> None:
    mesh = start_engine(max_step_tokens=50)
    mesh.start_workers("a", "b")
    prompt = prompts(1, 200, seed=3)[0] + list(range(50, 200))
    mesh.submit("scored", prompt, max_tokens=3, logprobs=2, prompt_logprobs=1)
    sequence = mesh.finish("scored")[0]
    logprobs = torch.log_softmax(reference.logits([*prompt, *sequence.tokens]), -1)
    first = sequence.deltas[0]
    assert len(first.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[0] is None
    for position, found in enumerate(first.prompt_logprobs[1:], 1):
        assert found is not None
        assert found.token == prompt[position]
        assert found.logprob == pytest.approx(
            float(logprobs[position - 1, prompt[position]]), abs=1e-4
        )
        assert found.top[0][1] == pytest.approx(float(logprobs[position - 1].max()), abs=1e-4)
    for index, delta in enumerate(sequence.deltas):
        (found,) = delta.logprobs
        assert found.token == delta.tokens[0]
        assert found.top[0] == (found.token, found.logprob)
        row = logprobs[len(prompt) - 1 + index]
        assert found.logprob == pytest.approx(float(row.max()), abs=1e-4)
    assert all(not delta.prompt_logprobs for delta in sequence.deltas[1:])


def test_a_prompt_alone_can_be_scored(start_engine) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    mesh.submit("scored", [5, 6, 7], max_tokens=0, prompt_logprobs=0)
    (delta,) = mesh.finish("scored")[0].deltas
    assert delta.tokens == ()
    assert delta.finish == "length"
    assert [p is None for p in delta.prompt_logprobs] == [True, False, False]


def test_stop_tokens_end_a_sequence(start_engine, reference) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    tokens = expected(reference, [5, 6, 7], 12)
    stop = tokens[6]
    mesh.submit("stops", [5, 6, 7], max_tokens=12, stop_token_ids=(stop,))
    sequence = mesh.finish("stops")[0]
    assert sequence.tokens == tokens[: tokens.index(stop)]
    assert sequence.finish == "stop"
    assert sequence.deltas[-1].stop_token == stop


def test_cancelling_frees_everything(start_engine) -> None:
    mesh = start_engine(max_running=2)
    mesh.start_workers("a")
    for i, prompt in enumerate(prompts(6)):
        mesh.submit(str(i), prompt, owner=b"g" if i < 4 else b"other", max_tokens=900)
    mesh.wait(lambda: mesh.sequences["0"].deltas)
    mesh.engine.cancel(("0", "3", "unknown"))
    mesh.finish("0", "3")
    mesh.engine.cancel_all_of(b"other")
    mesh.finish("4", "5")
    assert not mesh.sequences["1"].over
    mesh.engine.cancel_all_of(b"g")
    assert {sequence.finish for sequence in mesh.finish()} == {"cancelled"}
    all_is_free(mesh)


def test_each_gateway_gets_its_own(start_engine) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    mesh.submit("mine", [5], owner=b"me", max_tokens=3)
    mesh.submit("yours", [6], owner=b"you", max_tokens=3)
    mesh.finish()
    for results in mesh.steps:
        for owner, deltas in results.deltas.items():
            assert {d.request for d in deltas} == {"mine" if owner == b"me" else "yours"}


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        ([5, 3072], {}, "token id 3072"),
        ([-1], {}, "token id -1"),
        ([5], {"logit_bias": ((9999, 1.0),)}, "token id 9999"),
        ([5], {"stop_token_ids": (9999,)}, "token id 9999"),
        ([5] * 1000, {"max_tokens": 100}, "exceed the context"),
        ([], {}, "no token"),
    ],
)
def test_what_cannot_run_is_rejected_and_harms_nobody(start_engine, prompt, more, reason) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    mesh.submit("bad", prompt, **{"max_tokens": 4, **more})
    mesh.submit("good", [5, 6], max_tokens=4)
    bad, good = mesh.finish()
    assert bad.rejected is not None
    assert reason in bad.rejected.reason
    assert bad.rejected.retry_after_s == 0
    assert good.finish == "length"


def test_a_full_queue_says_when_to_come_back(start_engine) -> None:
    mesh = start_engine(max_running=1, max_waiting=1)
    mesh.start_workers("a")
    mesh.submit("runs", [5], max_tokens=900)
    mesh.wait(lambda: mesh.sequences["runs"].deltas)
    mesh.submit("waits", [5], max_tokens=1)
    mesh.submit("too many", [5], max_tokens=1)
    rejected = mesh.finish("too many")[0].rejected
    assert rejected is not None
    assert rejected.retry_after_s > 0
    mesh.engine.cancel(("runs",))
    assert mesh.finish("waits")[0].finish == "length"


def test_a_request_past_its_deadline_ends_with_an_error(start_engine) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    mesh.submit("late", [5], max_tokens=1000, deadline_ms=1)
    sequence = mesh.finish("late")[0]
    assert sequence.finish == "error"
    assert "deadline" in sequence.deltas[-1].error
    assert sequence.deltas[-1].error_kind == ""
    all_is_free(mesh)


def test_a_lost_worker_that_returns_costs_no_token(start_engine, reference) -> None:
    mesh = start_engine(micro_batches="2")
    mesh.start_workers("a", "b")
    asked = prompts(3, 20)
    for i, prompt in enumerate(asked):
        mesh.submit(str(i), prompt, max_tokens=40)
    mesh.wait(lambda: len(mesh.sequences["0"].tokens) >= 3)
    mesh.workers["b"].stop()
    mesh.wait(lambda: mesh.engine.state.unserved)
    assert "not serving: b" in mesh.engine.state.unserved
    mesh.start_worker("b")
    mesh.publish()
    for prompt, sequence in zip(asked, mesh.finish(), strict=True):
        assert sequence.tokens == expected(reference, prompt, 40)
    all_is_free(mesh)


@pytest.mark.parametrize("seen_dead", [True, False])
def test_a_hung_worker_is_given_up_when_the_view_says_so(
    start_engine, reference, seen_dead
) -> None:
    mesh = start_engine()
    mesh.start_workers("a", "b")
    mesh.submit("r", [5, 6, 7], max_tokens=30)
    mesh.wait(lambda: len(mesh.sequences["r"].tokens) >= 3)
    mesh.workers["b"].held.clear()  # its lane stands, it answers no more
    if seen_dead:
        mesh.publish(b="dead")
        mesh.wait(lambda: mesh.engine.state.unserved)
    mesh.start_worker("b")
    mesh.publish()
    assert mesh.finish("r")[0].tokens == expected(reference, [5, 6, 7], 30)
    all_is_free(mesh)


def test_only_requests_that_needed_lost_experts_fail_and_later_ones_run(start_engine) -> None:
    mesh = start_engine(expert_timeout_s=0.05)
    mesh.start_workers("a", "b")
    mesh.submit("fine", [5], max_tokens=2)
    mesh.finish("fine")
    mesh.workers["b"].stop()
    mesh.wait(lambda: mesh.engine.state.unserved)
    mesh.submit("doomed", [5], max_tokens=2)
    doomed = mesh.finish("doomed")[0]
    assert doomed.finish == "error"
    assert "no expert worker served experts" in doomed.deltas[-1].error
    assert doomed.deltas[-1].error_kind == "unavailable"
    all_is_free(mesh)
    mesh.start_worker("b")
    mesh.publish()
    mesh.wait(lambda: not mesh.engine.state.unserved)
    mesh.submit("later", [5], max_tokens=2)
    assert mesh.finish("later")[0].tokens == mesh.sequences["fine"].tokens


def test_stopping_ends_what_runs_and_what_waits_for_experts(start_engine) -> None:
    mesh = start_engine()
    mesh.start_workers("a", "b")
    mesh.submit("runs", [5], max_tokens=900)
    mesh.wait(lambda: mesh.sequences["runs"].deltas)
    mesh.workers["b"].stop()
    mesh.wait(lambda: mesh.engine.state.unserved)
    mesh.stop()
    assert mesh.finish("runs")[0].finish == "cancelled"


def test_the_profile_accounts_for_every_step(start_engine) -> None:
    mesh = start_engine()
    mesh.start_workers("a")
    mesh.submit("r", [5, 6, 7], max_tokens=20)
    mesh.finish("r")
    all_is_free(mesh)
    times = mesh.engine.times
    assert times.steps == 20
    assert times.tokens == 3 + 19
    parts = [times.plan_ns, times.attention_ns, times.gate_ns, times.shared_ns, times.head_ns]
    around = [times.send_ns, times.wait_ns, times.combine_ns, times.sampling_ns]
    assert all(ns > 0 for ns in (*parts, *around, times.python_ns))
    assert sum(parts) + sum(around) + times.python_ns == times.step_ns
    loads, top_k = mesh.engine.loads(), mesh.spec.experts_per_token
    assert loads.tokens == times.tokens
    assert (loads.experts.sum(1) == (3 + 19) * top_k).all()
    assert (loads.decodes.sum(1) == 19 * top_k).all()
    assert loads.rank_pairs == {"a": ((3 + 19) * top_k,) * len(mesh.spec.moe_layers)}
    assert (loads.epoch, loads.ranks) == (1, ("a",))


def test_a_worker_that_hangs_while_it_looks_alive_is_given_up(start_engine, reference) -> None:
    mesh = start_engine(expert_timeout_s=0.5)
    mesh.start_workers("a", "b")
    mesh.submit("stuck", [5, 6, 7], max_tokens=900)
    mesh.wait(lambda: mesh.sequences["stuck"].deltas)
    mesh.workers["b"].held.clear()
    assert mesh.finish("stuck")[0].deltas[-1].error_kind == "unavailable"
    assert "not serving: b" in mesh.engine.state.unserved
    mesh.publish()  # says that it is ready, as its heartbeats do
    mesh.submit("soon after", [5], max_tokens=2)
    assert mesh.finish("soon after")[0].finish == "error"
    all_is_free(mesh)
    mesh.start_worker("b")
    mesh.publish()
    mesh.submit("later", [5, 6, 7], max_tokens=10)
    assert mesh.finish("later")[0].tokens == expected(reference, [5, 6, 7], 10)


def test_requests_of_a_stuck_step_end_when_they_are_cancelled_or_late(
    start_engine, reference
) -> None:
    mesh = start_engine(expert_timeout_s=120.0)
    mesh.start_workers("a", "b")
    mesh.submit("before", [5], max_tokens=2)
    mesh.finish("before")
    assert mesh.engine.progress is None
    mesh.workers["b"].held.clear()
    mesh.submit("cancelled", [5, 6], max_tokens=2)
    mesh.wait(lambda: mesh.engine.progress)
    mesh.submit("late", [5, 6], max_tokens=2, deadline_ms=50)
    assert mesh.finish("late")[0].finish == "error"
    mesh.submit("never seen", [5, 6], max_tokens=2)
    mesh.engine.cancel(("cancelled", "never seen"))
    assert {s.finish for s in mesh.finish("cancelled", "never seen")} == {"cancelled"}
    mesh.wait(lambda: mesh.engine.progress is None)  # nobody wants it any more
    mesh.submit("next", [5, 6, 7], max_tokens=10)
    mesh.workers["b"].held.set()
    assert mesh.finish("next")[0].tokens == expected(reference, [5, 6, 7], 10)
    all_is_free(mesh)


def test_requests_wait_for_a_worker_that_is_loading(start_engine, reference) -> None:
    mesh = start_engine(expert_timeout_s=0.05)
    mesh.start_workers("a", "b")
    mesh.submit("r", [5, 6, 7], max_tokens=30)
    mesh.wait(lambda: len(mesh.sequences["r"].tokens) >= 3)
    mesh.publish(b="loading")
    mesh.wait(lambda: mesh.engine.state.unserved)
    mesh.submit("late", [5], max_tokens=2, deadline_ms=500)
    assert "deadline" in mesh.finish("late")[0].deltas[-1].error  # 10 time-outs later
    assert not mesh.sequences["r"].over
    mesh.publish()
    assert mesh.finish("r")[0].tokens == expected(reference, [5, 6, 7], 30)


def test_a_micro_batch_that_breaks_off_frees_its_ring_slots(
    start_engine, reference, monkeypatch
) -> None:
    broken = {"now": False}
    shared = TimedModel.shared

    def sometimes(self, layer, x):
        if broken["now"]:
            raise ArithmeticError("no luck")
        return shared(self, layer, x)

    monkeypatch.setattr(TimedModel, "shared", sometimes)
    mesh = start_engine()
    mesh.start_workers("a", "b")
    broken["now"] = True
    for i in range(10):  # more than a ring has slots
        mesh.submit(f"bad {i}", [5, 6], max_tokens=2)
        bad = mesh.finish(f"bad {i}")[0].deltas[-1]
        assert (bad.error, bad.error_kind) == ("ArithmeticError: no luck", "")
    broken["now"] = False
    mesh.submit("good", [5, 6, 7], max_tokens=10)
    assert mesh.finish("good")[0].tokens == expected(reference, [5, 6, 7], 10)
    all_is_free(mesh)


def test_what_another_sequence_left_in_the_cache_harms_nobody(start_engine, monkeypatch) -> None:
    new_kv_cache = RouterModel.new_kv_cache

    def poisoned(self, num_blocks: int, block_size: int) -> KVCache:
        kv = new_kv_cache(self, num_blocks, block_size)
        kv.clear(range(num_blocks))
        for layer in kv.layers:
            layer.fill_(float("nan"))
        return kv

    plain = ReferenceModel(checkpoint_dir(""))
    asked = [*prompts(3, 60), [5]]
    want = [list(plain.generate(prompt, 20, ignore_eos=True)) for prompt in asked]
    monkeypatch.setattr(RouterModel, "new_kv_cache", poisoned)
    mesh = start_engine(plain)
    mesh.start_workers("a")
    for i, prompt in enumerate(asked):
        mesh.submit(str(i), prompt, max_tokens=20)
    assert [sequence.tokens for sequence in mesh.finish()] == want


def test_the_prefix_of_a_sequence_without_finite_logits_is_not_reused(
    start_engine, reference, monkeypatch
) -> None:
    wrong = {"now": True}
    attend = TimedModel.attend

    def sometimes(self, layer, h, plan, kv):
        h = attend(self, layer, h, plan, kv)
        if wrong["now"]:
            kv.layers[layer][plan.cache_rows[:1]] = float("nan")
            h = h * float("nan")
        return h

    monkeypatch.setattr(TimedModel, "attend", sometimes)
    mesh = start_engine(max_step_tokens=40)
    mesh.start_workers("a")
    prompt = prompts(1, 60, seed=4)[0] + list(range(100, 140))
    mesh.submit("bad", prompt, max_tokens=8)
    assert "not finite" in mesh.finish("bad")[0].deltas[-1].error
    wrong["now"] = False
    mesh.submit("good", prompt, max_tokens=8)
    good = mesh.finish("good")[0]
    assert good.tokens == expected(reference, prompt, 8)
    assert good.deltas[0].cached_tokens == 0


def test_a_flood_of_cancellations_is_bounded(start_engine, monkeypatch) -> None:
    monkeypatch.setattr("router_svc.engine._MAX_CANCELLATIONS", 3)
    mesh = start_engine()
    mesh.stop()
    for i in range(10):
        mesh.engine.cancel((str(i),))
    assert len(mesh.engine._commands) == 3


def test_each_phase_of_a_sequences_life_is_measured_once(start_engine) -> None:
    mesh = start_engine(max_running=1, max_step_tokens=16)
    mesh.start_workers("a")
    for name in ("first", "second"):
        mesh.submit(name, list(range(10, 50)), max_tokens=4)
    mesh.finish()
    phases = mesh.engine.phases
    for phase in (phases.queue, phases.prefill, phases.decode):
        samples = {s.name.rpartition("_")[2]: s.value for s in phase.family("x", "").samples}
        assert samples["count"] == 2
        assert samples["sum"] > 0
    layers = mesh.engine.times.layers
    assert sum(layers.dispatch) == mesh.engine.times.send_ns
    assert sum(layers.wait) == mesh.engine.times.wait_ns
    assert sum(layers.combine) == mesh.engine.times.combine_ns
    assert all(layers.compute)
    (lane,) = mesh.engine.lane_bytes.values()
    assert lane.received > 0
    assert lane.sent > 0
