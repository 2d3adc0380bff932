"""Two traces are compared point by point in the order of the forward, and one sentence says where they part."""

import base64
import math
import struct
from collections.abc import Mapping, Sequence

import pytest

from mismatch_hooks.pipeline.activations import compare_activations, describe, differing, incomparable, summarise
from mismatch_hooks.schema.activation import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    IN_LAYER,
    ActivationCapture,
    ModuleActivations,
    SequenceActivations,
)
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.score import Binding, Evidence
from mismatch_hooks.schema.trace import ModuleComparison

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING


def module(semantic: str, *rows: str, values: Sequence[float] = (), width: int = 1) -> ModuleActivations:
    """One point of a pass over one sequence; a letter a row stands for its digest."""
    encoded = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    one = SequenceActivations(digests=rows, largest=(1.0,) * len(rows), values=encoded)
    return ModuleActivations(semantic=semantic, dtype="bfloat16", width=width, sequences=(one,))


def capture(
    role: PolicyRole, *modules: ModuleActivations, tokens: str = "t", left_out: Mapping[str, str] | None = None
) -> ActivationCapture:
    return ActivationCapture(
        role=role,
        binding=Binding(role=role),
        token_digests=(tokens,),
        modules=modules,
        left_out=left_out or {},
        evidence=Evidence(forwards=(1,)),
        seconds=0.0,
    )


def compared(rollout: Sequence[ModuleActivations], training: Sequence[ModuleActivations]) -> list[ModuleComparison]:
    captures = {ROLLOUT: capture(ROLLOUT, *rollout), TRAINING: capture(TRAINING, *training)}
    return list(compare_activations(captures))


def test_points_come_in_the_order_of_the_forward_whatever_order_they_were_recorded_in() -> None:
    names = ["head", "layers.10.input_norm", "layers.9.output", "final_norm", "layers.9.rope", "embedding"]
    modules = [module(name, "a") for name in names]
    expected = ["embedding", "layers.9.rope", "layers.9.output", "layers.10.input_norm", "final_norm", "head"]
    assert [one.semantic for one in compared(modules, modules[::-1])] == expected


def test_rows_are_counted_and_the_first_that_differs_is_named() -> None:
    (one,) = compared([module("embedding", "a", "b", "c")], [module("embedding", "a", "x", "y")])
    assert (one.tokens, one.equal_tokens, one.first_difference, one.missing_on) == (3, 1, (0, 1), None)
    assert not one.agrees


def test_equal_rows_differ_by_zero_and_sizes_that_nobody_kept_are_not_zero() -> None:
    (equal,) = compared([module("embedding", "a")], [module("embedding", "a")])
    (unequal,) = compared([module("embedding", "a")], [module("embedding", "b")])
    assert (equal.agrees, equal.max_abs) == (True, 0.0)
    assert math.isnan(unequal.max_abs)


def test_kept_values_give_the_largest_difference() -> None:
    rollout = module("embedding", "a", "b", values=(1.0, 2.0, -3.0, 0.5), width=2)
    training = module("embedding", "a", "c", values=(1.0, 2.0, -3.25, 0.625), width=2)
    (one,) = compared([rollout], [training])
    assert one.max_abs == 0.25


def test_rows_of_two_widths_are_not_compared_and_the_reason_is_given() -> None:
    captures = {
        ROLLOUT: capture(ROLLOUT, module("embedding", "a"), module("head", "a", width=512)),
        TRAINING: capture(TRAINING, module("embedding", "a"), module("head", "b", width=640)),
    }
    assert [one.semantic for one in compare_activations(captures)] == ["embedding"]
    assert incomparable(captures) == {"head": "its rows hold 640 values on training and 512 on rollout"}


@pytest.mark.parametrize("lacking", [ROLLOUT, TRAINING])
def test_a_point_of_one_side_is_missing_on_the_other_and_neither_agrees_nor_differs(lacking: PolicyRole) -> None:
    here = [module("final_norm", "a")]
    (one,) = compared([] if lacking is ROLLOUT else here, [] if lacking is TRAINING else here)
    assert (one.missing_on, one.tokens, one.agrees) == (lacking, 0, False)
    assert differing([one]) == ()


def test_traces_of_other_tokens_are_never_compared() -> None:
    captures = {ROLLOUT: capture(ROLLOUT, tokens="t"), TRAINING: capture(TRAINING, tokens="u")}
    with pytest.raises(ValueError, match="traces of different tokens"):
        compare_activations(captures)


def test_a_capture_of_the_other_role_is_refused() -> None:
    with pytest.raises(ValueError, match="got a capture of rollout for training"):
        compare_activations({ROLLOUT: capture(ROLLOUT), TRAINING: capture(ROLLOUT)})


FORWARD = ("embedding", "layers.0.input_norm", "layers.0.output", "layers.1.input_norm", "final_norm")


@pytest.mark.parametrize(
    ("parts_at", "sentence"),
    [
        pytest.param(
            3,
            "Identical up to layer 0's output, first difference at layer 1 input norm (1 of 2 tokens).",
            id="in the second layer",
        ),
        pytest.param(0, "First difference at the embedding (1 of 2 tokens).", id="at once"),
        pytest.param(5, "No difference in any layer: 5 points, 2 tokens.", id="nowhere"),
    ],
)
def test_the_sentence_says_up_to_where_both_agree(parts_at: int, sentence: str) -> None:
    rollout = [module(name, "a", "b") for name in FORWARD]
    training = [module(name, "a", "b" if place < parts_at else "x") for place, name in enumerate(FORWARD)]
    assert summarise(compared(rollout, training)) == sentence


def test_the_sentence_gives_the_size_where_it_was_measured_and_counts_what_one_side_lacks() -> None:
    rollout = [module("embedding", "a", values=(1.0,)), module("head", "a")]
    training = [module("embedding", "b", values=(1.5,))]
    assert summarise(compared(rollout, training)) == (
        "First difference at the embedding (1 of 1 tokens, by up to 0.5); 1 more points were recorded on one side only."
    )


def test_nothing_compared_is_never_no_difference() -> None:
    sentence = summarise(compared([module("embedding", "a")], []))
    assert sentence == "Nothing was compared; 1 more points were recorded on one side only."


def test_every_traced_point_has_words() -> None:
    for name in (*BEFORE_LAYERS, *AFTER_LAYERS, *(f"layers.3.{point}" for point in IN_LAYER)):
        assert "_" not in describe(name) and "." not in describe(name)
    assert describe("layers.3.input_norm") == "layer 3 input norm"
