"""Where the seconds of a step go."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Phases:
    """Seconds of one step by phase.

    Attributes:
        seconds: phase to seconds; phases that come more than once add up.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, phase: str) -> None:
        """Count the time since the last mark to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds counted so far."""
        return sum(self.seconds.values())
