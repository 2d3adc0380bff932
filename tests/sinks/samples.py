"""Payloads as the hooks stream them."""

from typing import Any

GATES = ("switch_effective", "evidence_complete", "shards_complete", "pitfalls_clear")


def verdict(*, diagnosis: str = "insufficient_evidence", blocked: str = "", **changes: Any) -> dict[str, Any]:
    """A verdict's payload; ``blocked`` names a gate that failed, and then no arm was read."""
    arms = {} if blocked else {
        "both_native": {"dlogp_mean": 0.0437, "clip_fraction": 0.0115},
        "both_reference": {"dlogp_mean": 0.0428, "clip_fraction": 0.0098},
    }  # fmt: skip
    effect = {"dlogp_change": -0.0009, "interval": [-0.0031, 0.0012], "tokens_needed": None}
    return {
        "factor": "attention.rope_fusion",
        "origin": "native",
        "noise_floor": "production",
        "path": "rollout_full_prefill",
        "diagnosis": diagnosis,
        "reason": "612 tokens resolve 0.0031 and nothing moved [by more].",
        "recommendation": "Raise sample_sequences to 256.",
        "arms": arms,
        "gates": {
            name: {"ok": name != blocked, "reason": "0 of 28 calls ran" if name == blocked else "holds"}
            for name in GATES
        },
        "effects": {} if blocked else {"both_reference": effect},
        "tokens": 612,
        "interval": None,
        "resolvable": 0.0031,
        "passes": 4,
        "seconds": 3.2,
        "fingerprint": "ab12",
    } | changes


def alert(**changes: Any) -> dict[str, Any]:
    """An alert's payload."""
    return {
        "kind": "clip_fraction",
        "severity": "critical",
        "state": "opened",
        "title": "clip_fraction rose from 0.011 to 0.21",
        "text": "Since step 8 clip_fraction is 0.21 against 0.011.",
        "since_step": 8,
        "value": 0.21,
        "baseline": 0.011,
        "transient": False,
        "recommendation": "Compare the rope settings of both sides.",
    } | changes
