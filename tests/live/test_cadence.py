"""When an ablation runs: at its step, after an alert, and never above its share of wall time once its cost is known."""

import math

import pytest

from mismatch_hooks.live.cadence import Cadence


def _simulate(cadence: Cadence, *, steps: int, step_s: float, cost_s: float) -> tuple[list[int], list[float]]:
    """Run a loop on a simulated clock: the steps that ablated, and the share of wall time after each."""
    clock, ran, shares = 0.0, [], []
    for step in range(steps):
        clock += step_s
        if cadence.decide(step, elapsed_s=clock):
            clock += cost_s
            cadence.record(cost_s, least_s=cost_s, whole_s=cost_s)
            ran.append(step)
            shares.append(cadence.spent_s / clock)
    return ran, shares


def test_ablations_that_fit_the_budget_keep_their_steps() -> None:
    cadence = Cadence(every=20, budget=0.05)
    ran, _ = _simulate(cadence, steps=101, step_s=10.0, cost_s=5.0)
    assert (ran, cadence.postponed) == ([20, 40, 60, 80, 100], 0)


def test_the_cadence_stretches_until_the_budget_holds() -> None:
    cadence = Cadence(every=5, budget=0.05)
    ran, shares = _simulate(cadence, steps=1_000, step_s=1.0, cost_s=2.0)
    assert ran[0] == 5
    assert all(share <= 0.05 for share in shares[1:])
    # 2 s in 40 s of wall time, of which 38 s are steps: 26 in 1,000 steps, and hardly any budget is left unused.
    assert 24 <= len(ran) <= 26
    assert cadence.spent_s == 2.0 * len(ran)


def test_the_first_ablation_runs_at_its_step_whatever_it_costs() -> None:
    cadence = Cadence(every=3, budget=0.01)
    ran, shares = _simulate(cadence, steps=4, step_s=1.0, cost_s=100.0)
    assert ran == [3]
    assert shares[0] > 0.9


def test_step_zero_is_not_due() -> None:
    assert Cadence(every=1, budget=1.0).decide(0, elapsed_s=1.0) is False
    assert Cadence(every=1, budget=1.0).decide(1, elapsed_s=1.0) is True


def test_an_overdue_ablation_runs_as_soon_as_it_can_be_afforded() -> None:
    cadence = Cadence(every=10, budget=0.1)
    cadence.record(1.0, least_s=1.0, whole_s=1.0)
    assert [cadence.decide(10, elapsed_s=5.0), cadence.decide(11, elapsed_s=12.0)] == [False, False]
    # 1 s spent and 1 s to come are a tenth of 19 s + 1 s.
    assert [cadence.decide(12, elapsed_s=18.9), cadence.decide(13, elapsed_s=19.1)] == [False, True]
    assert cadence.postponed == 1
    cadence.record(1.0, least_s=1.0, whole_s=1.0)
    assert cadence.decide(14, elapsed_s=1e6) is False


def test_an_alert_asks_for_an_ablation_out_of_turn_and_once() -> None:
    cadence = Cadence(every=1_000, budget=1.0)
    assert cadence.decide(7, elapsed_s=1.0) is False
    cadence.requested = True
    assert cadence.decide(8, elapsed_s=2.0) is True
    cadence.record(0.1, least_s=0.1, whole_s=0.1)
    assert (cadence.requested, cadence.decide(9, elapsed_s=3.0)) == (False, False)


def test_an_alert_does_not_break_the_budget() -> None:
    cadence = Cadence(every=1_000, budget=0.05)
    cadence.record(1.0, least_s=1.0, whole_s=1.0)
    cadence.requested = True
    assert cadence.decide(8, elapsed_s=2.0) is False
    assert cadence.decide(50, elapsed_s=100.0) is True


def test_a_due_ablation_waits_until_all_of_it_can_be_afforded() -> None:
    cadence = Cadence(every=10, budget=0.1)
    cadence.record(1.0, least_s=0.5, whole_s=2.0)
    # 1 s spent and 2 s to come are a tenth of 28 s + 2 s.
    assert [cadence.decide(10, elapsed_s=27.9), cadence.decide(11, elapsed_s=28.1)] == [False, True]


def test_after_an_alert_it_begins_as_soon_as_one_factor_can_be_afforded() -> None:
    cadence = Cadence(every=10, budget=0.1)
    cadence.record(1.0, least_s=0.5, whole_s=2.0)
    cadence.requested = True
    # 1 s spent and 0.5 s to come are a tenth of 14.5 s + 0.5 s.
    assert [cadence.decide(10, elapsed_s=14.4), cadence.decide(11, elapsed_s=14.6)] == [False, True]


def test_an_ablation_may_take_what_the_budget_has_left_when_it_ends() -> None:
    cadence = Cadence(every=10, budget=0.1)
    cadence.record(1.0, least_s=0.5, whole_s=2.0)
    # 1 s and 2 s are a tenth of 28 s + 2 s.
    assert cadence.allowance_s(elapsed_s=28.0) == pytest.approx(2.0, rel=1e-12)
    assert Cadence(every=10, budget=1.0).allowance_s(elapsed_s=1.0) == math.inf


@pytest.mark.parametrize("requested", [False, True], ids=["in turn", "after an alert"])
def test_every_zero_is_never(requested: bool) -> None:
    cadence = Cadence(every=0, budget=1.0, requested=requested)
    assert not any(cadence.decide(step, elapsed_s=1e9) for step in range(100))
