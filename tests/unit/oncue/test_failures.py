"""Wrong keys and tokens make the address that they come from wait."""

from __future__ import annotations

import pytest

from oncue import failures as failures_module
from oncue.failures import Failures


def test_too_many_wrong_keys_make_an_address_wait() -> None:
    failures = Failures(3, 60)
    for _ in range(2):
        failures.note_failure("10.0.0.1", 100)
    assert failures.wait_seconds("10.0.0.1", "d", 100) == 0
    failures.note_failure("10.0.0.1", 130)
    # The window began with the first.
    assert failures.wait_seconds("10.0.0.1", "d", 130) == 30
    assert failures.wait_seconds("10.0.0.2", "d", 130) == 0
    assert failures.wait_seconds("10.0.0.1", "d", 160) == 0
    failures.note_failure("10.0.0.1", 161)
    assert failures.wait_seconds("10.0.0.1", "d", 161) == 0


def test_what_was_right_from_an_address_stays_right_there_alone() -> None:
    failures = Failures(1, 60)
    failures.note_success("10.0.0.1", "good")
    failures.note_failure("10.0.0.1", 0)
    failures.note_failure("10.0.0.2", 0)
    assert failures.wait_seconds("10.0.0.1", "good", 1) == 0
    assert failures.wait_seconds("10.0.0.1", "other", 1) > 0
    assert failures.wait_seconds("10.0.0.2", "good", 1) > 0


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("no:address", "no:address", True),
    ],
)
def test_addresses_of_one_network_count_together(one: str, other: str, together: bool) -> None:
    failures = Failures(1, 60)
    failures.note_failure(one, 0.0)
    assert (failures.wait_seconds(other, "d", 0.0) > 0) is together


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures_module, "MOST_ADDRESSES", 10)
    monkeypatch.setattr(failures_module, "MOST_GOOD", 5)
    failures = Failures(1, 60)
    for number in range(100):
        failures.note_failure(f"10.0.0.{number}", 0)
        failures.note_success("10.0.0.1", str(number))
    assert failures.size == 15
    assert failures.wait_seconds("10.0.0.99", "d", 1) > 0
