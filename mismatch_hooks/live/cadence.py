"""When an ablation may run: every so many steps, or after an alert, and never above its share of wall time."""

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
    _last_cost_s: float | None = None
    _overdue: bool = False

    def decide(self, step: int, *, elapsed_s: float) -> bool:
        """Return whether to ablate now.

        An ablation that is due and cannot be afforded yet stays due: the cadence stretches. The first one runs at its
        step, whatever it costs, because nothing is known about its cost before.

        Args:
            step: the loop's step; counted from 0.
            elapsed_s: wall time since the hooks started, seconds, ablations included.
        """
        if not self.every:
            return False
        due = self._overdue or self.requested or (step > 0 and step % self.every == 0)
        if not due:
            return False
        if self._last_cost_s is not None and self.spent_s + self._last_cost_s > self.budget * (
            elapsed_s + self._last_cost_s
        ):
            self.postponed += 0 if self._overdue else 1
            self._overdue = True
            return False
        return True

    def record(self, cost_s: float) -> None:
        """Account for an ablation that ran."""
        self.spent_s += cost_s
        self._last_cost_s = cost_s
        self._overdue = self.requested = False
