from __future__ import annotations

import pytest
import torch

from expert_svc.heap import is_out_of_memory


def test_an_allocation_that_fails_is_told_from_a_bug() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as bug:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert not is_out_of_memory(bug.value)
