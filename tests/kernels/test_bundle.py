from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.bundle import (
    BundleError,
    checksum,
    checksum_of,
    largest_bundle,
    open_bundle,
    pack_bundle,
)
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.packed import Storage, has_fp16_kernel

SMALL, ODD, LARGE = (192, 48), (50, 37), (256, 320)
HEADER = 64


def random_expert(shape, seed=0):
    hidden, inter = shape
    random = torch.Generator().manual_seed(seed)

    def matrix(*size):
        return torch.randn(*size, generator=random).mul_(0.1).bfloat16()

    return matrix(inter, hidden), matrix(inter, hidden), matrix(hidden, inter)


def outputs(bank, weights):
    """What the bank makes of one token and of thirty."""
    bank.install(0, 0, weights)
    made = []
    for rows in (1, 30):
        x = torch.randn(rows, bank.hidden, generator=torch.Generator().manual_seed(rows))
        out = torch.empty(rows, bank.hidden)
        token = np.arange(rows, dtype=np.int32)
        bank.run_rows(x, token, np.zeros(rows, np.int32), out)
        made.append(out)
    return torch.cat(made)


@pytest.mark.parametrize("shape", [SMALL, ODD, LARGE, (64, 800)])
@pytest.mark.parametrize(
    ("kind", "exact"), [("auto", False), ("fp32", False), ("auto", True), ("fp16", True)]
)
def test_an_expert_that_travelled_computes_the_same_bits(shape, kind, exact):
    owner = ExpertBank(1, *shape, kind=kind, exact=exact)
    kept = owner.keep(*random_expert(shape))
    loaded = checksum_of(kept, 3, 7)
    weights = owner.pack(kept)
    bundle = pack_bundle(weights.kept(), 3, 7)
    assert checksum(bundle) == checksum_of(weights.kept(), 3, 7) == loaded
    assert bundle.nbytes <= largest_bundle(*shape)

    receiver = ExpertBank(1, *shape, kind=kind, exact=exact)
    arrived = receiver.pack(open_bundle(bundle.clone(), 3, 7))
    assert checksum_of(arrived.kept(), 3, 7) == loaded
    assert arrived.nbytes == weights.nbytes
    assert torch.equal(outputs(receiver, arrived), outputs(owner, weights))


@pytest.mark.parametrize("shape", [SMALL, ODD, LARGE])
def test_no_flipped_bit_passes_both_the_format_and_the_checksum_of_what_was_loaded(shape):
    """Even if the check of the bytes as received were left out."""
    bank = ExpertBank(1, *shape)
    bundle = pack_bundle(bank.keep(*random_expert(shape)), 3, 7)
    good = checksum(bundle)
    places = [*range(HEADER), HEADER, bundle.nbytes // 2, bundle.nbytes - 65, bundle.nbytes - 1]
    for place in places:
        for bit in (1, 128):
            spoilt = bundle.clone()
            spoilt[place] ^= bit
            assert checksum(spoilt) != good
            try:
                weights = bank.pack(open_bundle(spoilt, 3, 7))
            except (BundleError, ValueError):
                continue
            assert place >= HEADER or bundle[place] in set(Storage), "only a storage can be another"
            assert checksum_of(weights.kept(), 3, 7) != good, (place, bit)


def test_bytes_that_are_no_bundle_are_refused_by_what_is_wrong():
    bank = ExpertBank(1, *ODD)
    bundle = pack_bundle(bank.keep(*random_expert(ODD)), 3, 7)
    longer = torch.cat([bundle, torch.zeros(64, dtype=torch.uint8)])
    for spoilt, text in (
        (bundle[:0].clone(), "0 bytes"),
        (bundle[:63].clone(), "63 bytes"),
        (bundle[:64].clone(), "header needs more"),
        (bundle[:-1].clone(), "header needs more"),
        (longer, "does not have"),
        (torch.zeros(4096, dtype=torch.uint8), "format"),
        (torch.full((4096,), 255, dtype=torch.uint8), "format"),
    ):
        with pytest.raises(BundleError, match=text):
            open_bundle(spoilt, 3, 7)
    for layer, expert in ((3, 6), (4, 7)):
        with pytest.raises(BundleError, match="expert 7 of layer 3, expected"):
            open_bundle(bundle, layer, expert)


def test_a_bank_takes_only_what_it_would_keep_itself():
    def bundle_of(shape, **kind):
        bank = ExpertBank(1, *shape, **kind)
        return pack_bundle(bank.keep(*random_expert(shape)), 0, 0)

    def refusal(bundle, shape, **kind):
        with pytest.raises(ValueError, match=r".") as refused:
            ExpertBank(1, *shape, **kind).pack(open_bundle(bundle, 0, 0))
        return str(refused.value)

    assert "another layout" in refusal(bundle_of(SMALL), LARGE)
    assert "expected torch.float32" in refusal(bundle_of(LARGE, kind="fp32"), (320, 320))
    half_small = bundle_of((64, 800), kind="fp32")  # its second matrix is a plain tensor
    assert "rows of PLAIN weights depend" in refusal(half_small, (64, 800), exact=True)
    if has_fp16_kernel():
        fp16 = bundle_of(LARGE, kind="fp16")
        assert "weights where fp32 is asked for" in refusal(fp16, LARGE, kind="fp32")
        assert "weights where fp32 is asked for" in refusal(fp16, LARGE, exact=True)
