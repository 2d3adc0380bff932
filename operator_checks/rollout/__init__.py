"""How the rollout engine runs a pass: decode or prefill, how many together, and what only a new engine can change."""
