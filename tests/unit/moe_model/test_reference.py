from __future__ import annotations

import msgspec
import pytest

from mesh.messages import Sampling
from moe_model.reference import ReferenceModel

from .conftest import DEMO


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(DEMO)


def sample(reference: ReferenceModel, **kw) -> list[int]:
    sampling = Sampling(**({"temperature": 0.0} | kw))
    return list(reference.generate([5, 6, 7], 20, sampling=sampling, ignore_eos=True))


def test_a_seed_repeats_its_draws_and_another_differs(reference: ReferenceModel) -> None:
    first = sample(reference, temperature=1.0, seed=1)
    assert first == sample(reference, temperature=1.0, seed=1)
    assert first != sample(reference, temperature=1.0, seed=2)


def test_a_narrow_nucleus_is_greedy(reference: ReferenceModel) -> None:
    assert sample(reference, temperature=1.0, top_p=1e-6) == sample(reference)


def test_generation_ends_with_the_context(reference: ReferenceModel) -> None:
    context = reference.model.spec.max_context
    prompt = [5] * (context - 3)
    assert len(list(reference.generate(prompt, 10, ignore_eos=True))) == 3
    assert list(reference.generate([5] * context, 10)) == []


def test_generation_stops_at_end_of_sequence_without_yielding_it(
    reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sample(reference, temperature=1.0)
    end = next(token for token in tokens[5:] if token not in tokens[:5])
    model = reference.model
    monkeypatch.setattr(model, "spec", msgspec.structs.replace(model.spec, eos_token_ids=(end,)))
    got = list(reference.generate([5, 6, 7], 20, sampling=Sampling(temperature=1.0)))
    assert got == tokens[: tokens.index(end)]
