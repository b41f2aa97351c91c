"""Waits on a device end: by the work's end, or by the deadline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ep_kernels.triton.bank import DeviceBank
from ep_kernels.triton.device import Device, DeviceHung, open_device, wait_for
from ep_kernels.triton.flights import Flights
from ep_kernels.triton.transfer import Fixed, download, upload


class Late:
    """A mark that is done when it has been looked at ``looks`` times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def test_a_wait_ends_with_the_work_or_names_the_device(device: Device) -> None:
    mark = Late(5)
    wait_for(device, mark)
    assert mark.looks == 0
    with pytest.raises(DeviceHung, match=r"'interpreter' has not ended its work for 0\.01 s"):
        wait_for(device, Late(1 << 60), timeout_s=0.01)


def test_a_flight_that_never_lands_is_an_error(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = DeviceBank(1, 16, 16, top_k=1, device=device, loading=device.stream())
    bank.install(0, 0, bank.pack(bank.keep(*(torch.ones(16, 16) for _ in range(3)))))
    flights = Flights(device)
    monkeypatch.setattr(type(flights._down), "mark", lambda _self: Late(1 << 60))
    one = np.zeros(1, dtype=np.int32)
    flight = flights.begin(bank, [torch.ones(1, 16)], one, one, np.ones(1, dtype=np.float32))
    assert not flight.done
    monkeypatch.setattr("ep_kernels.triton.flights.TIMEOUT_S", 0.0)
    with pytest.raises(DeviceHung):
        _ = flight.done


def test_what_is_sent_up_and_down_is_a_copy(device: Device, rng: torch.Generator) -> None:
    sent = [
        torch.randn(3, 5, generator=rng),
        torch.arange(7),
        torch.empty(0, 4, dtype=torch.int32),
        torch.randn(1, generator=rng).bfloat16(),
    ]
    there = upload(device, *sent)
    kept = [tensor.clone() for tensor in sent]
    for tensor in sent:
        tensor.fill_(1)
    back = download(device, device.stream(), *there)
    for tensor, wanted in zip(back, kept, strict=True):
        assert torch.equal(tensor, wanted)
        assert tensor.dtype is wanted.dtype


def test_fixed_tensors_stay_where_they_are(device: Device) -> None:
    fixed = Fixed(device, torch.empty(2, 3), torch.empty(5, dtype=torch.int32))
    places = [view.data_ptr() for view in fixed.views]
    assert not any(view.any() for view in fixed.views)
    fixed.send(torch.ones(2, 3), torch.arange(5, dtype=torch.int32))
    assert [view.data_ptr() for view in fixed.views] == places
    assert torch.equal(fixed.views[0], torch.ones(2, 3))
    assert fixed.views[1].tolist() == [0, 1, 2, 3, 4]
