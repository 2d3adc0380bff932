"""The metrics against a float64 reference that sums exactly, and the promises of a state: it merges, it round-trips."""

import json
import math
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_hooks.pipeline.metric_table import METRICS
from mismatch_hooks.pipeline.metrics import (
    DtypeError,
    LogprobTensors,
    MetricInputError,
    MetricState,
    ShapeError,
    from_lists,
    measure,
    merge,
    worst_tokens,
)

UNIT_ROUNDOFF = 2.0**-53
EXACT = (  # counts, shares of counts, maxima and quantiles: any split, any order, to the bit
    "tokens",
    "sequences",
    "nonfinite",
    "clipped",
    "clip_fraction",
    "clip_fraction_signed",
    "dlogp_p50",
    "dlogp_p99",
    "dlogp_p999",
    "dlogp_max",
    "ratio_max",
    "ratio_overflow",
    "bitwise_fraction",
    "same_sign_fraction",
    "constant_difference",
)
ROUNDED = tuple(name for name in METRICS if name not in EXACT and name != "is_silent_failure")

Row = list[tuple[float, float, bool]]


def tensors_of(rows: Sequence[Row]) -> LogprobTensors:
    return from_lists(
        [[t for t, _, _ in row] for row in rows],
        [[r for _, r, _ in row] for row in rows],
        [[active for _, _, active in row] for row in rows],
    )


def state_of(rows: Sequence[Row], advantages: Sequence[float] | None = None) -> MetricState:
    signs = None if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return measure(*tensors_of(rows), epsilon_low=0.2, epsilon_high=0.3, advantages=signs)


def same_value(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def reference(rows: Sequence[Row], advantages: Sequence[float]) -> dict[str, float]:
    """The formulas of the table, token by token in float64, added exactly (``math.fsum``)."""
    active = [
        (t, r, advantage)
        for row, advantage in zip(rows, advantages, strict=True)
        for t, r, is_active in row
        if is_active
    ]
    counted = [(t, r, advantage) for t, r, advantage in active if math.isfinite(t) and math.isfinite(r)]
    counts = {"tokens": len(counted), "nonfinite": len(active) - len(counted)}
    sequences = [[t - r for t, r, on in row if on and math.isfinite(t) and math.isfinite(r)] for row in rows]
    sequences = [sequence for sequence in sequences if sequence]
    if not counted:
        return dict.fromkeys(METRICS, math.nan) | {"sequences": 0, "clipped": 0, "ratio_overflow": 0} | counts
    tokens = len(counted)
    dlogp = [t - r for t, r, _ in counted]
    magnitude = sorted(abs(d) for d in dlogp)
    ratio = [math.exp(d) for d in dlogp]

    def mean(terms: Sequence[float]) -> float:
        return math.fsum(terms) / len(terms)

    def quantile(thousandths: int) -> float:
        rank, rest = divmod((tokens - 1) * thousandths, 1000)
        above = magnitude[min(rank + 1, tokens - 1)]
        return magnitude[rank] + (above - magnitude[rank]) * (rest / 1000)

    high, low = math.log1p(0.3), math.log1p(-0.2)
    clipped = sum(d > high or d < low for d in dlogp)
    signs = [sum(d > 0 for d in dlogp), sum(d < 0 for d in dlogp)]
    square_mean = mean([rho * rho for rho in ratio])
    return counts | {
        "sequences": len(sequences),
        "clipped": clipped,
        "clip_fraction": clipped / tokens,
        "clip_fraction_signed": sum(
            (a > 0 and d > high) or (a < 0 and d < low) for d, (_, _, a) in zip(dlogp, counted, strict=True)
        )
        / tokens,
        "dlogp_mean": mean(magnitude),
        "dlogp_signed_mean": mean(dlogp),
        "dlogp_p50": quantile(500),
        "dlogp_p99": quantile(990),
        "dlogp_p999": quantile(999),
        "dlogp_max": magnitude[-1],
        "ratio_mean": mean(ratio),
        "ratio_max": max(ratio),
        "ratio_overflow": 0,
        "k1": -mean(dlogp),
        "k3": mean([math.expm1(d) - d for d in dlogp]),
        "ppl_ratio": mean([math.exp(-mean(sequence)) for sequence in sequences]),
        "chi2_token": square_mean - 1,
        "ess": mean(ratio) ** 2 / square_mean,
        "prob_diff_mean": mean([abs(math.exp(t) - math.exp(r)) for t, r, _ in counted]),
        "bitwise_fraction": sum(t == r and math.copysign(1, t) == math.copysign(1, r) for t, r, _ in counted)
        / len(active),
        "same_sign_fraction": max(signs) / sum(signs) if sum(signs) else math.nan,
        "constant_difference": tokens > 1 and min(dlogp) == max(dlogp) != 0,
    }


def rounding(rows: Sequence[Row]) -> Callable[[str, float], float]:
    """The largest error that fp64 may make in one metric over ``rows``.

    A sum of n terms, each wrong by at most e ulps, divided once: (n + e + 1) · u · mean |term| (Higham 2002, eq. 4.4).
    exp, log and expm1 are wrong by at most 4 ulps here; an exponent x that is itself wrong by u·|x| moves exp(x) by the
    relative amount u·|x|, twice: once in dlogp − largest, once in largest + log(mean).
    """
    dlogp = [t - r for row in rows for t, r, on in row if on and math.isfinite(t) and math.isfinite(r)]
    tokens = len(dlogp) + 10
    spread = max((abs(d) for d in dlogp), default=0.0)
    mean_size = math.fsum(abs(d) for d in dlogp) / max(len(dlogp), 1)
    relative = (tokens + 4 * spread) * 4 * UNIT_ROUNDOFF

    def allowed(name: str, value: float) -> float:
        # The additive part is what cancels: expm1(d) − d, ρ² − 1, a signed mean, a difference of probabilities.
        additive = {"chi2_token": 1.0, "prob_diff_mean": 1.0}.get(name, mean_size)
        return relative * (abs(value) + additive)

    return allowed


logprobs = st.one_of(
    st.floats(min_value=-40.0, max_value=0.0),
    st.floats(min_value=-3.0, max_value=0.0, width=32),
    st.sampled_from([0.0, -0.0, -0.5, math.nan, -math.inf, -1e-300]),
)
tokens_of = st.tuples(logprobs, logprobs, st.booleans()) | logprobs.map(lambda value: (value, value, True))
batches = st.lists(st.lists(tokens_of, max_size=12), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(rows=batches, data=st.data())
def test_every_metric_equals_a_float64_reference(rows: list[Row], data: st.DataObject) -> None:
    advantages = data.draw(st.lists(st.floats(-2, 2), min_size=len(rows), max_size=len(rows)))
    metrics = state_of(rows, advantages).finalize()
    expected = reference(rows, advantages)
    allowed = rounding(rows)
    for name in EXACT:
        assert same_value(metrics[name], expected[name]), name
    for name in ROUNDED:
        if math.isnan(expected[name]):
            assert math.isnan(metrics[name]), name
        else:
            assert abs(metrics[name] - expected[name]) <= allowed(name, expected[name]), name


@settings(max_examples=200, deadline=None)
@given(rows=batches, data=st.data())
def test_any_split_and_any_order_merge_to_the_same_metrics(rows: list[Row], data: st.DataObject) -> None:
    whole = state_of(rows).finalize()
    shuffled = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    edges = [0, *cuts, len(rows)]
    parts = [state_of(shuffled[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    nested = merge([merge(parts[:1]), *parts[1:]]).finalize()
    allowed = rounding(rows)
    for name in EXACT:
        assert same_value(nested[name], whole[name]), name
    for name in ROUNDED:
        if math.isnan(whole[name]):
            assert math.isnan(nested[name]), name
        else:
            assert abs(nested[name] - whole[name]) <= 2 * allowed(name, whole[name]), name


@settings(max_examples=100, deadline=None)
@given(rows=batches, data=st.data())
def test_slices_of_sequences_on_several_ranks_merge_to_the_whole(rows: list[Row], data: st.DataObject) -> None:
    training, rollout, mask = tensors_of(rows)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=mask.numel(), max_size=mask.numel())))
    owner = owner.reshape(mask.shape)
    whole = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.3).finalize()
    slices = [
        measure(
            training,
            rollout,
            mask & (owner == rank),
            epsilon_low=0.2,
            epsilon_high=0.3,
            sequence_ids=torch.arange(len(rows)),
        )
        for rank in range(3)
    ]
    merged = merge(slices).finalize()
    allowed = rounding(rows)
    for name in EXACT:
        assert same_value(merged[name], whole[name]), name
    if not math.isnan(whole["ppl_ratio"]):
        assert abs(merged["ppl_ratio"] - whole["ppl_ratio"]) <= 2 * allowed("ppl_ratio", whole["ppl_ratio"])


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.floats(-1e300, 0), st.floats(-1e300, 0), st.just(True)), min_size=1, max_size=6),
        min_size=1,
    )
)
def test_differences_that_overflow_every_ratio_stay_finite_in_the_dlogp_metrics(rows: list[Row]) -> None:
    metrics = state_of(rows).finalize()
    assert metrics["nonfinite"] == 0
    assert all(math.isfinite(metrics[name]) for name in METRICS if name.startswith("dlogp") or name in ("k1", "ess"))
    unmeasured = {"clip_fraction_signed", "same_sign_fraction"}  # no advantages; possibly no difference
    assert not any(math.isnan(value) for name, value in metrics.items() if name not in unmeasured)


def test_the_mean_of_differences_whose_sum_overflows_fp64_is_finite() -> None:
    metrics = state_of([[(0.0, -1.5e308, True), (0.0, -1.5e308, True)]]).finalize()
    assert metrics["dlogp_mean"] == metrics["dlogp_signed_mean"] == 1.5e308


@pytest.mark.parametrize("values", [(-0.5, -0.5), (-0.0, 0.0)], ids=["equal", "zeros of two signs"])
def test_no_difference_reads_as_positive_zero(values: tuple[float, float]) -> None:
    metrics = state_of([[(*values, True)]]).finalize()
    assert {name for name, value in metrics.items() if value == 0 and math.copysign(1, value) < 0} == set()


@pytest.mark.parametrize(
    ("sequences", "response"),
    [pytest.param(700, 1000, id="many rows a block"), pytest.param(2, 300_000, id="a row larger than a block")],
)
def test_a_batch_of_several_blocks_measures_every_row_with_its_own_advantage(sequences: int, response: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(sequences, response, generator=generator)
    training = rollout + 0.3 * torch.randn(sequences, response, generator=generator)
    mask = torch.rand(sequences, response, generator=generator) < 0.8
    advantages = torch.randn(sequences, generator=generator)
    metrics = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2, advantages=advantages).finalize()
    dlogp = training.double() - rollout.double()
    above, below = dlogp > math.log1p(0.2), dlogp < math.log1p(-0.2)
    sign = advantages.unsqueeze(1)
    dropped = ((above & (sign > 0)) | (below & (sign < 0))) & mask
    tokens = int(mask.sum())
    assert (metrics["tokens"], metrics["sequences"]) == (tokens, sequences)
    assert metrics["clipped"] == int(((above | below) & mask).sum())
    assert metrics["clip_fraction_signed"] == int(dropped.sum()) / tokens
    assert metrics["dlogp_max"] == float(dlogp[mask].abs().max())
    # At most 2 · tokens roundings of terms whose mean is dlogp_mean, on either side.
    assert metrics["dlogp_mean"] == pytest.approx(
        math.fsum(dlogp[mask].abs().tolist()) / tokens, rel=2 * tokens * 2**-53
    )


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_quantiles_interpolate_linearly_as_torch_does(values: list[float]) -> None:
    rows = [[(0.0, -value, True) for value in values]]
    metrics = state_of(rows).finalize()
    for name, share in (("dlogp_p50", 0.5), ("dlogp_p99", 0.99), ("dlogp_p999", 0.999)):
        expected = float(torch.quantile(torch.tensor(values, dtype=torch.float64), share))
        # torch rounds the rank share · (n − 1) to fp64 first: an error of n · u ranks, over a gap of at most max.
        assert abs(metrics[name] - expected) <= (len(values) + 4) * 2 * UNIT_ROUNDOFF * max(values)


def test_every_metric_is_described_and_nothing_else_is_returned() -> None:
    assert list(state_of([[(-0.5, -0.4, True)]]).finalize()) == list(METRICS)
    assert list(state_of([]).finalize()) == list(METRICS)
    assert all(info.formula and info.unit and info.meaning and info.trap for info in METRICS.values())


def test_a_state_survives_json_and_pickle_to_the_bit() -> None:
    state = state_of([[(-0.1, -0.3, True), (math.nan, -1.0, True)], [(-1 / 3, -2 / 7, True)]], [1.0, -1.0])
    expected = state.finalize(healthy_dlogp_mean=0.01)
    through_json = MetricState.from_plain(json.loads(json.dumps(state.to_plain(), allow_nan=False)))
    assert through_json.finalize(healthy_dlogp_mean=0.01) == expected
    assert pickle.loads(pickle.dumps(state)).finalize(healthy_dlogp_mean=0.01) == expected


def test_plain_data_of_an_empty_state_round_trips_and_is_neutral_in_a_merge() -> None:
    empty = MetricState.from_plain(json.loads(json.dumps(state_of([[]]).to_plain())))
    full = state_of([[(-0.1, -0.3, True)]], [1.0])
    assert merge([empty, full, empty]).finalize() == full.finalize()


def test_a_state_can_be_merged_again_after_it_was_finalized() -> None:
    state = state_of([[(-0.1, -0.3, True), (-0.5, -0.4, True)]])
    before = state.to_plain()
    state.finalize()
    merge([state, state])
    assert state.to_plain() == before


def test_inputs_are_not_changed_and_no_gradient_is_kept() -> None:
    training = torch.tensor([[-0.1, -0.2]], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([[-0.3, -0.4]], dtype=torch.float64)
    rng = torch.get_rng_state()
    state = measure(training, rollout, torch.tensor([[1, 1]]), epsilon_low=0.2, epsilon_high=0.2)
    state.finalize()
    assert training.tolist() == [[-0.1, -0.2]]
    assert rollout.tolist() == [[-0.3, -0.4]]
    assert not state.dlogp.requires_grad
    assert torch.equal(torch.get_rng_state(), rng)


def test_fp32_and_fp64_may_be_mixed_and_differences_are_taken_in_fp64() -> None:
    rollout = torch.tensor([[-0.1]], dtype=torch.float32)
    training = torch.tensor([[-0.1]], dtype=torch.float64)
    metrics = measure(
        training, rollout, torch.ones(1, 1, dtype=torch.bool), epsilon_low=0.2, epsilon_high=0.2
    ).finalize()
    assert metrics["dlogp_max"] == abs(-0.1 - float(torch.tensor(-0.1)))
    assert metrics["bitwise_fraction"] == 0.0


def test_a_transposed_view_measures_as_its_contiguous_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    training, rollout = (-torch.rand(5, 3, generator=generator) for _ in range(2))
    mask = torch.rand(5, 3, generator=generator) < 0.7
    viewed = measure(training.T, rollout.T, mask.T, epsilon_low=0.2, epsilon_high=0.2)
    copied = measure(training.T.clone(), rollout.T.clone(), mask.T.clone(), epsilon_low=0.2, epsilon_high=0.2)
    assert viewed.to_plain() == copied.to_plain()


def test_worst_tokens_are_ordered_by_size_then_place_and_skip_what_is_masked_or_not_finite() -> None:
    training = torch.tensor([[-1.0, -1.0, -9.0, -1.0], [-1.0, math.nan, -1.0, -3.0]])
    rollout = torch.tensor([[-1.5, -1.0, -1.0, -0.5], [-1.5, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    assert worst_tokens(training, rollout, mask, k=3) == ((1, 3, -2.0), (0, 0, 0.5), (0, 3, -0.5))
    assert worst_tokens(training, rollout, mask, k=99)[-1] == (1, 2, 0.0)
    assert worst_tokens(training, rollout, torch.zeros_like(mask), k=3) == ()


LOGPROBS = torch.full((2, 3), -0.5)
MASK = torch.ones(2, 3, dtype=torch.bool)


def measure_with(
    training: Tensor = LOGPROBS,
    rollout: Tensor = LOGPROBS,
    mask: Tensor = MASK,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    advantages: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> MetricState:
    return measure(
        training,
        rollout,
        mask,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        advantages=advantages,
        sequence_ids=sequence_ids,
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(
            lambda: measure_with(rollout=LOGPROBS[:, :2]),
            ShapeError,
            "training_logprobs is [2, 3], rollout_logprobs [2, 2], response_mask [2, 3]; all three are one [batch, "
            "response], so align them by token, never by cutting or padding one of them.",
            id="shapes differ",
        ),
        pytest.param(
            lambda: measure_with(LOGPROBS[0], LOGPROBS[0], MASK[0]),
            ShapeError,
            "training_logprobs is [3], rollout_logprobs [3], response_mask [3]; all three are one [batch, response], "
            "so align them by token, never by cutting or padding one of them.",
            id="one dimension",
        ),
        pytest.param(
            lambda: measure_with(advantages=torch.ones(3)),
            ShapeError,
            "advantages is [3]; accepts [2], one a sequence, or [2, 3], one a token.",
            id="advantages of another batch",
        ),
        pytest.param(
            lambda: measure_with(mask=MASK.float()),
            DtypeError,
            "response_mask is torch.float32; accepts bool, or integers that are all 0 or 1.",
            id="float mask",
        ),
        pytest.param(
            lambda: measure_with(mask=torch.tensor([[1, 1, 2], [0, 1, 1]])),
            MetricInputError,
            "response_mask holds 2; accepts bool, or integers that are all 0 or 1: weights and segment ids are not "
            "masks.",
            id="segment ids as a mask",
        ),
        pytest.param(
            lambda: measure_with(epsilon_low=1.0),
            MetricInputError,
            "epsilon_low: got 1.0; accepts a number from 0 to below 1, the clip range as the loop uses it.",
            id="epsilon_low of 1",
        ),
        pytest.param(
            lambda: measure_with(epsilon_high=math.nan),
            MetricInputError,
            "epsilon_high: got nan; accepts a finite number of 0 or more, the clip range as the loop uses it.",
            id="epsilon_high of NaN",
        ),
        pytest.param(
            lambda: measure_with(sequence_ids=torch.tensor([0, -1])),
            MetricInputError,
            "sequence_ids is [0, -1] (torch.int64); accepts integers of 0 or more.",
            id="negative sequence id",
        ),
        pytest.param(
            lambda: merge([]),
            MetricInputError,
            "merge got no metric state; give it one per micro-batch or rank, empty ones included.",
            id="nothing to merge",
        ),
        pytest.param(
            lambda: merge([measure_with(), measure_with(epsilon_high=0.28)]),
            MetricInputError,
            "merge got epsilon_low, epsilon_high = 0.2, 0.28 beside 0.2, 0.2; counts add up only under one clip range, "
            "so measure all micro-batches and ranks with the loop's own.",
            id="two clip ranges",
        ),
        pytest.param(
            lambda: worst_tokens(LOGPROBS, LOGPROBS, MASK, k=0),
            MetricInputError,
            "k: got 0; accepts an integer of 1 or more.",
            id="no worst tokens asked for",
        ),
        pytest.param(
            lambda: from_lists([[-0.1], [-0.2]], [[-0.1]]),
            ShapeError,
            "rollout_logprobs has 1 sequences, training_logprobs 2; pass one list for each.",
            id="a sequence too few",
        ),
        pytest.param(
            lambda: from_lists([[-0.1]], [[-0.1]], [[0.5]]),  # type: ignore[list-item]
            MetricInputError,
            "response_mask of sequence 0 is [0.5]; it accepts bools, or 0 and 1.",
            id="a weight in a list mask",
        ),
    ],
)
def test_an_input_that_cannot_be_measured_is_refused_in_one_sentence(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_plain_data_with_other_keys_or_lengths_is_refused() -> None:
    plain = state_of([[(-0.1, -0.3, True)]]).to_plain()
    with pytest.raises(MetricInputError, match="takes exactly"):
        MetricState.from_plain({key: value for key, value in plain.items() if key != "equal"})
    with pytest.raises(MetricInputError, match="all three describe the same sequences"):
        MetricState.from_plain(plain | {"sequence_tokens": [1, 1]})
