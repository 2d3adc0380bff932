"""When an ablation may run: every so many steps, or after an alert, and never above its share of wall time."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Cadence:
    """Decides, and keeps the account.

    Attributes:
        every: steps between ablations; 0 is never.
        budget: share of wall time that ablation may take.
        spent_s: wall time spent so far, seconds.
        requested: True when an alert asked for an ablation out of turn.
        postponed: times that a due ablation was put off to honour the budget.
    """

    every: int
    budget: float
    spent_s: float = 0.0
    requested: bool = False
    postponed: int = 0
    _least_cost_s: float = 0.0
    _whole_cost_s: float = 0.0
    _overdue: bool = False

    def decide(self, step: int, *, elapsed_s: float) -> bool:
        """Return whether to ablate now.

        An ablation that is due stays due until all of it can be afforded: the cadence stretches. It is not begun for
        one factor, because what surrounds the factors costs more than most of them; after an alert it is, because the
        batch that shows the cause will not come back. The first one runs at its step, because nothing is known about
        its cost before.

        Args:
            step: the loop's step; counted from 0.
            elapsed_s: wall time since the hooks started, seconds, ablations included.
        """
        if not self.every:
            return False
        due = self._overdue or self.requested or (step > 0 and step % self.every == 0)
        if not due:
            return False
        cost_s = self._least_cost_s if self.requested else self._whole_cost_s
        if self.spent_s + cost_s > self.budget * (elapsed_s + cost_s):
            self.postponed += 0 if self._overdue else 1
            self._overdue = True
            return False
        return True

    def allowance_s(self, *, elapsed_s: float) -> float:
        """Return how long an ablation may take that begins now, seconds: what the budget has left by its end."""
        return math.inf if self.budget >= 1 else (self.budget * elapsed_s - self.spent_s) / (1 - self.budget)

    def record(self, cost_s: float, *, least_s: float, whole_s: float) -> None:
        """Account for an ablation that ran.

        Args:
            cost_s: what it took, seconds.
            least_s: what one with a single factor would have taken, seconds.
            whole_s: what one with every planned factor would have taken, seconds.
        """
        self.spent_s += cost_s
        self._least_cost_s, self._whole_cost_s = least_s, whole_s
        self._overdue = self.requested = False
