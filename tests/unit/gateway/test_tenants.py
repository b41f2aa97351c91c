import pytest

from gateway.errors import InvalidValue, RateLimited
from gateway.tenants import Limits, Tenant


def wait_s(tenant, now, sequences=1):
    with pytest.raises(RateLimited) as caught:
        tenant.check(sequences, now)
    return int(caught.value.headers["Retry-After"])


def test_without_limits_all_passes():
    tenant = Tenant("t")
    for _ in range(1000):
        tenant.check(100, 0.0)
        tenant.begin(100)
        tenant.spend(10**9)


def test_sequences_at_once():
    tenant = Tenant("t", Limits(max_concurrent=3))
    tenant.check(2, 0.0)
    tenant.begin(2)
    tenant.check(1, 0.0)
    wait_s(tenant, 0.0, sequences=2)
    tenant.finish(1)
    tenant.check(2, 0.0)
    with pytest.raises(InvalidValue, match="may have 3"):
        tenant.check(4, 0.0)


def test_requests_a_minute():
    tenant = Tenant("t", Limits(requests_per_minute=6))
    for _ in range(6):
        tenant.check(1, 0.0)
        tenant.begin(1)
    after = wait_s(tenant, 0.0)
    tenant.check(1, after)
    tenant.begin(1)
    wait_s(tenant, after)


def test_tokens_a_minute_may_be_overdrawn_and_are_paid_back():
    tenant = Tenant("t", Limits(tokens_per_minute=600))
    tenant.check(1, 0.0)
    tenant.spend(1200)  # 600 more than there were, at 10 a second
    assert 60 <= wait_s(tenant, 0.0) <= 61
    wait_s(tenant, 59.0)
    tenant.check(1, 61.0)


def test_an_idle_minute_earns_no_more_than_a_minutes_worth():
    tenant = Tenant("t", Limits(requests_per_minute=2))
    tenant.check(1, 0.0)
    tenant.check(1, 10_000.0)
    for _ in range(2):
        tenant.begin(1)
    wait_s(tenant, 10_000.0)
