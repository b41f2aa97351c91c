import pytest

from gateway.admission import Admission
from gateway.errors import InvalidValue, Overloaded


def retry_after(admission, sequences, now):
    with pytest.raises(Overloaded) as caught:
        admission.admit(sequences, now)
    return int(caught.value.headers["Retry-After"])


def test_room_is_taken_and_given_back():
    admission = Admission(3, 0.0)
    admission.admit(2, 0.0)
    admission.admit(1, 0.0)
    assert retry_after(admission, 1, 0.0) >= 1
    admission.finish(2, 1.0)
    admission.admit(2, 1.0)
    assert admission.in_flight == 3


def test_a_refused_request_takes_no_room():
    admission = Admission(2, 0.0)
    admission.admit(1, 0.0)
    retry_after(admission, 2, 0.0)
    assert admission.in_flight == 1


def test_what_can_never_fit_is_refused_for_good():
    with pytest.raises(InvalidValue, match="at most 3"):
        Admission(3, 0.0).admit(4, 0.0)


def test_retry_after_follows_the_rate_of_finishing():
    admission = Admission(100, 0.0)
    admission.admit(100, 0.0)
    for second in range(1, 11):  # two a second
        admission.finish(2, float(second))
        admission.admit(2, float(second))
    assert retry_after(admission, 40, 10.5) == 20


def test_finishing_twice_is_our_bug():
    with pytest.raises(AssertionError):
        Admission(1, 0.0).finish(1, 0.0)
