"""Tenants that compete are served by weight, whatever they ask for and whatever others do."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.fairness import FairQueue

MAX_TOKENS = 50
TENANTS = ("a", "b", "c")
weights = st.sampled_from([0.5, 1.0, 3.0])
sizes = st.integers(1, MAX_TOKENS)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(weights, min_size=2, max_size=3),
    st.integers(1, 4),
    st.lists(sizes, min_size=60, max_size=60),
    st.lists(sizes, min_size=60, max_size=60),
)
def test_tenants_that_always_wait_get_tokens_by_weight(shares, places, prompts, outputs):
    """At most ``places`` items are in service; each ends after its output, oldest first."""
    queue = FairQueue()
    served = dict.fromkeys(range(len(shares)), 0)
    for n in range(60 * len(shares)):
        tenant = n % len(shares)
        queue.push(n, str(tenant), weight=shares[tenant])
    in_service = []

    def spend(tenant, tokens):
        queue.charge(str(tenant), tokens)
        served[tenant] += tokens

    for prompt, output in zip(prompts, outputs, strict=True):
        if len(in_service) == places:
            spend(*in_service.pop(0))
        tenant = queue.pop() % len(shares)
        spend(tenant, prompt)
        in_service.append((tenant, output))
    paid = [served[tenant] / weight for tenant, weight in enumerate(shares)]
    # What one may have in service when it is at last charged for it.
    bound = 2 * places * MAX_TOKENS / min(shares) + MAX_TOKENS / min(shares)
    assert max(paid) - min(paid) <= bound


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 500), st.integers(0, 10**6), weights)
def test_a_newcomer_is_next_but_one_however_much_waits(waiting, used, weight):
    queue = FairQueue()
    for n in range(waiting):
        queue.push(n, "flood", weight=weight)
    queue.pop()
    queue.charge("flood", used)
    queue.push("mine", "newcomer")
    order = []
    for _ in range(min(2, waiting)):
        order.append(queue.pop())
        queue.charge("flood", 1)  # of its prompt; no prompt is empty
    assert "mine" in order


def test_time_away_is_not_saved_up():
    queue = FairQueue()
    queue.push("first", "idle")
    assert queue.pop() == "first"
    for n in range(100):
        queue.push(n, "busy")
    for _ in range(50):
        queue.pop()
        queue.charge("busy", 100)
    for n in range(100):
        queue.push(f"i{n}", "idle")
    order = []
    for _ in range(20):
        item = queue.pop()
        tenant = "idle" if isinstance(item, str) else "busy"
        queue.charge(tenant, 100)
        order.append(tenant)
    assert 9 <= order.count("busy") <= 11


def test_within_a_tenant_priority_then_arrival():
    queue = FairQueue()
    for item, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        queue.push(item, "a", priority=priority)
    assert [queue.pop() for _ in range(5)] == ["urgent", "first", "second", "late", None]


class Model(RuleBasedStateMachine):
    """Nothing is lost, repeated or stuck, whatever the order of events."""

    def __init__(self):
        super().__init__()
        self.queue = FairQueue()
        self.waiting = {}
        self.count = 0

    @rule(tenant=st.sampled_from(TENANTS), weight=weights, priority=st.integers(-2, 2))
    def push(self, tenant, weight, priority):
        self.queue.push(self.count, tenant, weight=weight, priority=priority)
        self.waiting[self.count] = (tenant, priority)
        self.count += 1

    @rule()
    def pop(self):
        item = self.queue.pop()
        if item is None:
            assert not self.waiting
            return
        tenant, priority = self.waiting.pop(item)
        rest = [(p, n) for n, (t, p) in self.waiting.items() if t == tenant]
        assert all((priority, item) < other for other in rest)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.remove(item)
        del self.waiting[item]

    @rule(tenant=st.sampled_from(TENANTS), tokens=sizes)
    def charge(self, tenant, tokens):
        self.queue.charge(tenant, tokens)

    @invariant()
    def holds_what_waits(self):
        assert len(self.queue) == len(self.waiting)
        assert set(self.queue) == set(self.waiting)


Model.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
