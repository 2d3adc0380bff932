"""Roots are the points whose every traced input is the same on both sides; all others only pass something on."""

from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_hooks.model_meta.correspondence import ModuleCorrespondence, correspondences, propagation_edges
from mismatch_hooks.pipeline.trace import trace_root_causes
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.trace import Hypothesis, ModuleComparison
from tests.model_meta.test_correspondence import LLAMA

EDGES = propagation_edges(LLAMA)
POINTS = ("embedding", "layers.0.input_norm", "layers.0.rope", "layers.0.attention_output", "layers.0.output")


def compared(*differing: str, points: tuple[str, ...] = POINTS) -> list[ModuleComparison]:
    return [
        ModuleComparison(
            semantic=point,
            tokens=4,
            equal_tokens=0 if point in differing else 4,
            max_abs=0.0,
            first_difference=(0, 0) if point in differing else None,
        )
        for point in points
    ]


def hypotheses(*differing: str, settings: tuple[str, ...] = ()) -> list[tuple[str, Hypothesis]]:
    causes = trace_root_causes(compared(*differing), EDGES, settings)
    return [(cause.semantic, cause.hypothesis) for cause in causes]


def test_where_everything_agrees_nothing_is_suspicious() -> None:
    assert hypotheses() == []


def test_what_follows_from_a_root_is_propagated_through_points_that_were_not_traced() -> None:
    assert hypotheses("layers.0.input_norm", "layers.0.rope") == [
        ("layers.0.input_norm", Hypothesis.DIFFERENT_IMPLEMENTATION),
        # Between the norm and rope lies query_key_value, which nobody traced.
        ("layers.0.rope", Hypothesis.PROPAGATED_FROM_UPSTREAM),
    ]


def test_two_roots_come_before_what_they_cause() -> None:
    found = hypotheses("layers.0.input_norm", "layers.0.rope", "layers.0.output")
    assert found[0] == ("layers.0.input_norm", Hypothesis.DIFFERENT_IMPLEMENTATION)
    # The attention output agrees, so the layer's output differs by itself.
    assert found[1] == ("layers.0.output", Hypothesis.DIFFERENT_IMPLEMENTATION)
    assert found[2] == ("layers.0.rope", Hypothesis.PROPAGATED_FROM_UPSTREAM)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(("model.norm.epsilon",), Hypothesis.DIFFERENT_PARAMETER, id="its own parameter"),
        pytest.param(("model.rope.theta",), Hypothesis.DIFFERENT_IMPLEMENTATION, id="a parameter of another operator"),
    ],
)
def test_a_parameter_that_differs_explains_its_own_operator_only(
    settings: tuple[str, ...], expected: Hypothesis
) -> None:
    assert hypotheses("layers.0.input_norm", settings=settings) == [("layers.0.input_norm", expected)]


def test_a_point_that_one_side_lacks_is_a_missing_operator() -> None:
    gone = replace(compared()[1], tokens=0, equal_tokens=0, missing_on=PolicyRole.ROLLOUT)
    (cause,) = trace_root_causes([compared()[0], gone], EDGES)
    assert (cause.hypothesis, "rollout has no complete record" in cause.reason) == (Hypothesis.MISSING_OPERATOR, True)


def test_every_point_but_the_first_is_computed_from_another_one() -> None:
    for shape in (LLAMA, replace(LLAMA, qk_norm=True)):
        targets = {edge.target for edge in propagation_edges(shape)}
        named = {row.semantic for row in correspondences(shape)}
        assert named - targets == {"embedding"}
        if not shape.qk_norm:
            assert not any(
                "query_norm" in edge.source or "key_norm" in edge.target for edge in propagation_edges(shape)
            )


def test_each_claimed_equivalence_names_a_test_that_exists() -> None:
    for row in correspondences(LLAMA):
        path, _, name = row.verified_by.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
    with pytest.raises(SchemaError, match="accepts the node id of the test that proves the equivalence"):
        ModuleCorrespondence(
            semantic="head", training_module="a", rollout_module="b", equivalence="same", verified_by="trust me"
        )
