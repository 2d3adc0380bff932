"""With the hooks on, ablating every step, the run is to the bit the run without them."""

import pytest

from tests.loop.running import HOOKS_ON, Run, run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same configuration with the hooks off and on; two minibatches a rollout on one shape, one on the other."""
    folder = tmp_path_factory.mktemp(request.param)
    minibatches = f"grpo.minibatches={2 if request.param == 'tiny_qwen3' else 1}"
    without = run(request.param, folder / "off", minibatches)
    return without, run(request.param, folder / "on", minibatches, HOOKS_ON)


def test_weights_optimizer_random_streams_and_sampled_tokens_are_bitwise_equal(both: tuple[Run, Run]) -> None:
    without, with_hooks = both
    assert (without.exit_code, with_hooks.exit_code) == (0, 0), with_hooks.stderr
    assert with_hooks.result["digests"] == without.result["digests"]
    assert set(without.result["digests"]) == {"tokens", "weights", "optimizer", "rng"}


def test_losses_and_rewards_of_every_step_are_bitwise_equal(both: tuple[Run, Run]) -> None:
    figures = [
        [(step["loss"], step["reward"], step["grad_norm"], step["response_length"]) for step in one.result["steps"]]
        for one in both
    ]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 4


def test_three_of_four_steps_were_ablated_with_every_gate_open_and_no_error(both: tuple[Run, Run]) -> None:
    _, with_hooks = both
    verdicts = with_hooks.events("verdict")
    assert sorted({verdict["step"] for verdict in verdicts}) == [1, 2, 3]
    # Every live factor of the catalogue, each step, from either origin; those that rollout decodes for come on top.
    prefilled = [(verdict["step"], verdict["origin"]) for verdict in verdicts if verdict["path"] != "rollout_decode"]
    live = len({verdict["factor"] for verdict in verdicts})
    assert {place: prefilled.count(place) for place in prefilled} == {
        (step, origin): live for step in (1, 2, 3) for origin in ("aligned", "native")
    }
    failed = [gate for verdict in verdicts for gate in verdict["gates"].values() if not gate["ok"]]
    assert failed == []
    assert with_hooks.events("error") == []


def test_every_call_site_ran_its_reference_as_often_as_the_layers_demand(both: tuple[Run, Run]) -> None:
    _, with_hooks = both
    (opening, *_) = with_hooks.events("run")
    for verdict in with_hooks.events("verdict"):
        four_arms = "both_reference" in verdict["arms"]
        ran = "calls of the bound call sites ran the reference" in verdict["gates"]["evidence_complete"]["reason"]
        assert ran is four_arms
        assert not four_arms or verdict["passes"] == 4
        # Either origin's planned passes, two that prove restoration, and one that decodes the captured tokens; from
        # aligned also one native pass a role, and what is decoded a second time.
        planned = opening["plan"]["passes"] / 2
        assert verdict["ablation_passes"] == planned + 3 or verdict["origin"] == "aligned"
        assert verdict["ablation_passes"] >= planned + 5 or verdict["origin"] == "native"


def test_the_weights_of_both_sides_were_compared_by_content_in_every_step(both: tuple[Run, Run]) -> None:
    _, with_hooks = both
    steps = with_hooks.events("step")
    assert [step["metrics"]["weights_mismatched"] for step in steps] == [0, 0, 0, 0]
    assert all(step["metrics"]["weights_checked"] > 0 for step in steps)


def test_capture_covers_every_sampled_token_and_rescoring_repeats_what_was_sampled(both: tuple[Run, Run]) -> None:
    _, with_hooks = both
    assert [step["metrics"]["token_coverage"] for step in with_hooks.events("step")] == [1.0] * 4
    for verdict in (verdict for verdict in with_hooks.events("verdict") if verdict["arms"]):
        assert verdict["paths"]["training_rescore"]["tokens"] == verdict["tokens"]
        exact = "live_against_decode" if verdict["origin"] == "native" else "cross_framework"
        assert verdict["paths"][exact]["bitwise_fraction"] == 1.0


def test_a_trace_says_where_inside_the_model_the_sides_part(both: tuple[Run, Run]) -> None:
    _, with_hooks = both
    traces = with_hooks.events("trace")
    assert [trace["step"] for trace in traces] == [1, 2, 3]
    for trace in traces:
        assert trace["comparisons"][0]["semantic"] == "embedding"
        # A lookup copies rows, and the sides hold the same weights.
        assert trace["comparisons"][0]["equal_tokens"] == trace["comparisons"][0]["tokens"] > 0
        assert "first difference at" in trace["summary"]
