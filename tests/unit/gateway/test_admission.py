import pytest

from gateway.admission import Admission
from gateway.errors import InvalidValue, Overloaded
from gateway.tenants import Limits, Tenant


class Alone:
    """``Admission`` with one tenant."""

    def __init__(self, limit, now):
        self.tenant = Tenant("t")
        self.admission = Admission(limit, [self.tenant], now)

    def admit(self, sequences, now):
        self.admission.admit(self.tenant, sequences, now)

    def finish(self, sequences, now):
        self.admission.finish(self.tenant, sequences, now)

    @property
    def in_flight(self):
        return self.admission.in_flight


def retry_after(admission, sequences, now):
    with pytest.raises(Overloaded) as caught:
        admission.admit(sequences, now)
    return int(caught.value.headers["Retry-After"])


def test_room_is_taken_and_given_back():
    admission = Alone(3, 0.0)
    admission.admit(2, 0.0)
    admission.admit(1, 0.0)
    assert retry_after(admission, 1, 0.0) >= 1
    admission.finish(2, 1.0)
    admission.admit(2, 1.0)
    assert admission.in_flight == 3


def test_a_refused_request_takes_no_room():
    admission = Alone(2, 0.0)
    admission.admit(1, 0.0)
    retry_after(admission, 2, 0.0)
    assert admission.in_flight == 1


def test_what_can_never_fit_is_refused_for_good():
    with pytest.raises(InvalidValue, match="at most 3"):
        Alone(3, 0.0).admit(4, 0.0)


def test_retry_after_follows_the_rate_of_finishing():
    admission = Alone(100, 0.0)
    admission.admit(100, 0.0)
    for second in range(1, 11):  # two a second
        admission.finish(2, float(second))
        admission.admit(2, float(second))
    assert retry_after(admission, 40, 10.5) == 20


def test_finishing_twice_is_our_bug():
    with pytest.raises(AssertionError):
        Alone(1, 0.0).finish(1, 0.0)


def fill(admission, tenant):
    """Admit sequences of ``tenant`` until there is no room."""
    while True:
        try:
            admission.admit(tenant, 1, 0.0)
        except Overloaded:
            return


def test_one_tenant_may_use_all_the_room():
    a, b = Tenant("a"), Tenant("b")
    admission = Admission(8, [a, b], 0.0)
    fill(admission, a)
    assert a.in_flight == 8


def test_a_full_queue_still_has_each_tenants_share():
    a, b = Tenant("a", Limits(weight=3)), Tenant("b")
    admission = Admission(8, [a, b], 0.0)
    fill(admission, a)
    fill(admission, b)
    assert b.in_flight == 2
    fill(admission, a)
    assert admission.in_flight == 10


def test_every_tenant_may_have_one_sequence():
    tenants = [Tenant(str(i)) for i in range(20)]
    admission = Admission(4, tenants, 0.0)
    for tenant in tenants:
        fill(admission, tenant)
        assert tenant.in_flight >= 1


def test_a_refused_request_costs_its_tenant_nothing():
    tenant, other = Tenant("a", Limits(requests_per_minute=1)), Tenant("b")
    admission = Admission(2, [tenant, other], 0.0)
    admission.admit(other, 2, 0.0)
    with pytest.raises(Overloaded, match="queue is full"):
        admission.admit(tenant, 2, 0.0)
    assert tenant.in_flight == 0
    admission.admit(tenant, 1, 0.0)
