"""Where the events of a run go: W&B, JSON lines, the console. A sink can fail without touching the run.

May import schema only; wandb is imported when the W&B sink is built and not before.
"""
