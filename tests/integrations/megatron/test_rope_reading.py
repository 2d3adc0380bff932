"""Theta and scaling are read from the frequencies that the model rotates with."""

from collections.abc import Mapping

import pytest

from mismatch_hooks.integrations.megatron.rope import Rotary, read_rotary
from mismatch_hooks.references.rope import inverse_frequencies

LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 1.05e4, 12345.0])
@pytest.mark.parametrize(
    ("scaling", "kind", "factor"),
    [
        pytest.param({}, "default", 1.0, id="default"),
        pytest.param(LLAMA3, "llama3", 32.0, id="llama3"),
        pytest.param({"rope_type": "linear", "factor": 4.0}, "linear", 4.0, id="linear"),
    ],
)
def test_theta_and_scaling_are_exact_without_being_told(
    head_dim: int, theta: float, scaling: Mapping[str, object], kind: str, factor: float
) -> None:
    frequencies = inverse_frequencies(theta=theta, rotary_dim=head_dim, scaling=scaling)
    expected = Rotary(theta=theta, scaling_type=kind, scaling_factor=factor, last=float(frequencies[-1]))
    assert read_rotary(frequencies, []) == expected


def test_a_base_that_was_asked_for_counts_only_when_its_bits_are_there() -> None:
    frequencies = inverse_frequencies(theta=1e4, rotary_dim=64, scaling={})
    assert read_rotary(frequencies, [5e5, 10001.0]).theta == 1e4


def test_frequencies_of_no_known_rule_are_unknown() -> None:
    frequencies = inverse_frequencies(theta=1e4, rotary_dim=64, scaling={})
    frequencies[-4:] *= 2
    assert read_rotary(frequencies, [1e4]).scaling_type == "unknown"
