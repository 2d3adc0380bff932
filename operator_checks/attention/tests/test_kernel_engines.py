"""The attention of both live engines runs the reference while it is bound, and nothing of it is left afterwards.

The chain for one layer: what the live layer returns, in a prefill, a chunk or a decode step of whatever batch, is the
pure function of the queries, keys and values of that sequence alone, on either side; hence trainer prefill = rollout
prefill = rollout decode for equal inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.operator_checks.attention import adapter
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.references.attention import causal_attention
from mismatch_hooks.schema.enums import Choice, PolicyRole, SwitchStatus
from mismatch_hooks.schema.score import Score, ScoringSequence
from tests.tiny_engines import TinyEngines, recorded

pytestmark = pytest.mark.engine

KERNEL = "attention.kernel"
ROLES = [pytest.param(role, id=role.value) for role in PolicyRole]
BATCH = [
    ScoringSequence(
        prompt_token_ids=tuple(range(3, 3 + prompt)), response_token_ids=tuple(range(40, 49)), response_mask=(True,) * 9
    )
    for prompt in (3, 61, 7)
]


@pytest.fixture(params=["llama", "qwen3"])
def engines(request: pytest.FixtureRequest) -> TinyEngines:
    found: TinyEngines = request.getfixturevalue(f"{request.param}_engines")
    return found


def _logprobs(score: Score) -> list[tuple[float, ...]]:
    return [piece.logprobs for piece in score.shards[0].slices]


def _bound(engines: TinyEngines, role: PolicyRole) -> Score:
    engine = engines.engines[role]
    with engine.bind(engines.reference(role, KERNEL)):
        return engine.score(BATCH)


def _attentions(engines: TinyEngines, role: PolicyRole) -> list[Any]:
    if role is PolicyRole.ROLLOUT:
        return [layer.self_attn.attn.impl for layer in engines.models[role].model.layers]
    return [layer.self_attention.core_attention for layer in engines.models[role].decoder.layers]


@pytest.mark.parametrize("role", ROLES)
def test_every_layer_ran_the_reference_and_the_engine_is_as_before(engines: TinyEngines, role: PolicyRole) -> None:
    native = engines.engines[role].score(BATCH)
    bound = _bound(engines, role)
    (forwards,), (count,), (switch,) = bound.evidence.forwards, bound.evidence.calls, bound.evidence.switches
    assert forwards > 0
    assert (count.factor, count.expected, count.observed) == (KERNEL, 2 * forwards, 2 * forwards)
    assert (switch.effective, switch.status) == (Choice.REFERENCE, SwitchStatus.APPLIED)
    if role is PolicyRole.TRAINING:  # vLLM's kernel for processors with bf16 instructions has the reference's bits here
        assert _logprobs(bound) != _logprobs(native)
    assert _logprobs(engines.engines[role].score(BATCH)) == _logprobs(native)
    assert not any("forward" in vars(attention) for attention in _attentions(engines, role))


def test_a_row_of_the_trainer_is_the_pure_reference_of_its_sequence_alone(engines: TinyEngines) -> None:
    with recorded(engines.models[PolicyRole.TRAINING], ".core_attention") as calls:
        _bound(engines, PolicyRole.TRAINING)
    assert len(calls.seen) == 2
    lengths = [len(one.prompt_token_ids) + len(one.response_token_ids) for one in BATCH]
    for _, (query, key, value, _), output in calls.seen:
        for row, length in enumerate(lengths):
            alone = [part[:length, row][None] for part in (query, key, value)]
            expected = causal_attention(*alone, scale=engines.shape.head_dim**-0.5)
            assert torch.equal(output[:length, row], expected[0].flatten(1))


# ---- rollout ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What one attention layer attended to.

    Attributes:
        states: slot of the cache to its key and value, as they were handed over.
        rows: per sequence and forward: its new queries, all its keys, all its values, and what came out.
    """

    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def expected(self, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Give what came out of each row beside the pure reference of its whole sequence, as a trainer computes it."""
        for query, key, value, output in self.rows:
            whole = query.new_zeros(1, len(key), *query.shape[1:])
            whole[0, -len(query) :] = query
            yield output, causal_attention(whole, key[None], value[None], scale=scale)[0, -len(query) :]


@contextmanager
def _watched(engines: TinyEngines, seen: dict[str, Seen] | None = None) -> Iterator[dict[str, Seen]]:
    """Record what each attention layer of the rollout gets and returns; the cache is modelled, not read."""
    from vllm.model_executor.layers.attention.attention import Attention, get_attention_context

    found: dict[str, Seen] = {} if seen is None else seen

    def keep(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        metadata, _, cache, slots = get_attention_context(module.layer_name)
        if metadata is None:
            return
        layer = found.setdefault(module.layer_name, Seen())
        query, key, value, attended = (part.unflatten(-1, (-1, module.head_size)) for part in (*arguments, output))
        for row, slot in enumerate(slots.tolist()):
            layer.states[slot] = key[row].clone(), value[row].clone()
        starts, page = metadata.query_start_loc.tolist(), cache.shape[2]
        for row, length in enumerate(metadata.seq_lens.tolist()):
            pages = metadata.block_table[row].tolist()
            rows = slice(starts[row], starts[row + 1])
            owned = [layer.states[pages[token // page] * page + token % page] for token in range(length)]
            keys, values = (torch.stack(part) for part in zip(*owned, strict=True))
            layer.rows.append((query[rows].clone(), keys, values, attended[rows].clone()))

    layers = [module for module in engines.models[PolicyRole.ROLLOUT].modules() if isinstance(module, Attention)]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _generate(engines: TinyEngines, prompts: list[list[int]], new_tokens: list[int], salt: str) -> list[int]:
    """Decode greedily; return how many tokens of each prompt came from the prefix cache."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
    params = [
        # Without a seed: vLLM's CPU build cannot step a request's own stream back after a chunk.
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        for count in new_tokens
    ]
    llm: Any = engines.engines[PolicyRole.ROLLOUT]._llm  # type: ignore[attr-defined]
    return [output.num_cached_tokens for output in llm.generate(requests, params, use_tqdm=False)]


def test_prefill_and_decode_of_a_shrinking_batch_are_the_pure_reference_of_each_sequence(engines: TinyEngines) -> None:
    """Prompts of 1 to 150 tokens, one of which crosses a page and more than fit one forward; 1 to 30 new tokens."""
    lengths, new_tokens = [1, 150, 17, 40, 100], [30, 20, 1, 9, 14]
    prompts = [[(7 * row + token) % 500 + 3 for token in range(length)] for row, length in enumerate(lengths)]
    engine = engines.engines[PolicyRole.ROLLOUT]
    with engine.bind(engines.reference(PolicyRole.ROLLOUT, KERNEL)), _watched(engines) as seen:
        _generate(engines, prompts, new_tokens, "shrinking")
    assert len(seen) == 2
    for layer in seen.values():
        counts = [(len(query), len(key)) for query, key, _, _ in layer.rows]
        assert sum(new for new, _ in counts) == sum(lengths) + sum(new_tokens) - len(new_tokens)
        assert [new for new, _ in counts[-9:]] == [1] * 9  # alone from the twenty-first token on
        assert any(1 < new < all_so_far for new, all_so_far in counts)  # the rest of a prompt that was cut
        assert all(torch.equal(*pair) for pair in layer.expected(engines.shape.head_dim**-0.5))


def test_a_block_cached_before_the_binding_is_served_under_it_and_one_from_under_it_after(
    llama_engines: TinyEngines,
) -> None:
    """The native kernel, last: bf16 rounds an output of at most max |v| to 2⁻⁸ of it, and weights as much once more."""
    engine, prompt = llama_engines.engines[PolicyRole.ROLLOUT], [(3 * token) % 500 + 3 for token in range(200)]
    scale = llama_engines.shape.head_dim**-0.5
    with _watched(llama_engines) as seen:
        assert _generate(llama_engines, [prompt], [1], "before") == [0]
        for layer in seen.values():
            layer.rows.clear()
        with engine.bind(llama_engines.reference(PolicyRole.ROLLOUT, KERNEL)):
            assert _generate(llama_engines, [prompt, prompt[:150]], [3, 3], "before") == [128, 128]
            assert _generate(llama_engines, [prompt], [1], "under") == [0]
        for layer in seen.values():
            assert len(layer.rows) == 2 * 3 + 1
            assert all(torch.equal(*pair) for pair in layer.expected(scale))
            layer.rows.clear()
        assert _generate(llama_engines, [prompt], [1], "under") == [128]
    for layer in seen.values():
        ((output, expected),) = layer.expected(scale)
        assert float((output.float() - expected.float()).abs().max()) <= 2 * 2.0**-8 * float(
            layer.rows[0][2].abs().max()
        )


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_reference_takes_the_scale_from_the_head_dim_whatever_the_engine_was_built_with(
    llama_engines: TinyEngines, role: PolicyRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, right = llama_engines.engines[role].score(BATCH), _bound(llama_engines, role)
    for attention in _attentions(llama_engines, role):
        monkeypatch.setattr(attention, "scale" if role is PolicyRole.ROLLOUT else "softmax_scale", 0.25)
    assert _logprobs(llama_engines.engines[role].score(BATCH)) != _logprobs(native)
    assert _logprobs(_bound(llama_engines, role)) == _logprobs(right)


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        pytest.param("sliding_window", 128, "has a sliding window of 128 tokens;", id="sliding window"),
        pytest.param("alibi_slopes", torch.ones(4), "has ALiBi slopes;", id="ALiBi"),
        pytest.param("logits_soft_cap", 30.0, "caps its scores at 30.0;", id="soft cap"),
        pytest.param("sinks", torch.ones(4), "has attention sinks;", id="sinks"),
        pytest.param("attn_type", "encoder_decoder", "attends as encoder_decoder, not as a", id="cross attention"),
        pytest.param("is_fp8_kv_cache", True, "has a KV cache of auto;", id="quantised cache"),
        pytest.param("kv_sharing_target_layer_name", "layer.0", "reads the KV cache of layer.0;", id="shared cache"),
    ],
)
def test_a_rollout_layer_of_another_form_is_refused_by_name(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, sentence: str
) -> None:
    monkeypatch.setattr(_attentions(llama_engines, PolicyRole.ROLLOUT)[1], attribute, value)
    engine = llama_engines.engines[PolicyRole.ROLLOUT]
    with pytest.raises(BindingError) as refused, engine.bind(llama_engines.reference(PolicyRole.ROLLOUT, KERNEL)):
        pass
    assert f"the rollout's model.layers.1.self_attn.attn {sentence}" in str(refused.value)


def test_a_rollout_kernel_of_another_backend_is_refused_by_name(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = llama_engines.models[PolicyRole.ROLLOUT].model.layers[0].self_attn.attn
    monkeypatch.setattr(attention, "impl", object())
    parameters = adapter.parameters(KERNEL, llama_engines.shape)
    with pytest.raises(BindingError, match=r"^the rollout's model\.layers\.0\.self_attn\.attn runs object; the"):
        adapter.sites(KERNEL, PolicyRole.ROLLOUT, llama_engines.models[PolicyRole.ROLLOUT], parameters)


@pytest.mark.parametrize(
    ("attribute", "value", "sentence"),
    [
        pytest.param("attn_mask_type", SimpleNamespace(name="padding"), "masks by padding;", id="another mask"),
        pytest.param("attention_type", "cross", "is cross attention;", id="cross attention"),
        pytest.param(
            "scale_mask_softmax", SimpleNamespace(window_size=(64, 0)), "has a window of (64, 0);", id="sliding window"
        ),
        pytest.param("softmax_offset", torch.zeros(4), "has a softmax of type vanilla;", id="softmax with an offset"),
        pytest.param(
            "config",
            SimpleNamespace(context_parallel_size=2, softmax_type="vanilla"),
            "sees a slice (context parallel 2);",
            id="context parallel",
        ),
    ],
)
def test_a_trainers_layer_of_another_form_is_refused_by_name(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, sentence: str
) -> None:
    monkeypatch.setitem(vars(_attentions(llama_engines, PolicyRole.TRAINING)[1]), attribute, value)
    parameters = adapter.parameters(KERNEL, llama_engines.shape)
    with pytest.raises(BindingError) as refused:
        adapter.sites(KERNEL, PolicyRole.TRAINING, llama_engines.models[PolicyRole.TRAINING], parameters)
    assert f"the trainer's decoder.layers.1.self_attention.core_attention {sentence}" in str(refused.value)


@pytest.mark.parametrize("core", [None, torch.nn.Identity()], ids=["a layer without one", "another class"])
def test_a_trainers_attention_of_another_class_is_refused_by_name(core: Any) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))
    with pytest.raises(BindingError, match=rf"core_attention is a {type(core).__name__}; the attention reference cov"):
        adapter.sites(KERNEL, PolicyRole.TRAINING, model, {"scale": 0.5})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({"packed_seq_params": object()}, "packed sequences;", id="packed"),
        pytest.param({"attention_bias": torch.zeros(1)}, "an attention bias;", id="bias"),
        pytest.param({"query": torch.zeros(1, 1, 4, 32)}, "1 queries and 6 keys (a KV cache);", id="KV cache"),
        pytest.param(
            {"attention_mask": torch.zeros(1, 1, 6, 6, dtype=torch.bool)},
            "a mask that is not the causal one;",
            id="mask",
        ),
        pytest.param({}, "attention dropout of 0.1;", id="dropout"),
    ],
)
def test_a_call_of_the_trainer_that_the_reference_does_not_cover_is_refused(
    llama_engines: TinyEngines, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], sentence: str
) -> None:
    core = _attentions(llama_engines, PolicyRole.TRAINING)[0]
    given: dict[str, Any] = {name: torch.zeros(6, 1, 4, 32) for name in ("query", "key", "value")}
    given |= {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)}
    binding = llama_engines.reference(PolicyRole.TRAINING, KERNEL)
    with llama_engines.engines[PolicyRole.TRAINING].bind(binding):
        assert core(**given).tolist() == torch.zeros(6, 1, 128).tolist()
        if not arguments:
            monkeypatch.setattr(core, "training", True)
            monkeypatch.setattr(core.attention_dropout, "p", 0.1)
        with pytest.raises(BindingError) as refused:
            core(**{**given, **arguments})
    assert f"core_attention is called with {sentence}" in str(refused.value)


def test_gradients_pass_through_the_reference_as_through_the_trainers_own_kernel(llama_engines: TinyEngines) -> None:
    """Two bf16 computations of one function: a cosine tells a missing or wrong term from rounding."""
    core = _attentions(llama_engines, PolicyRole.TRAINING)[0]
    states = [torch.randn(40, 2, heads, 32).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    mask = torch.ones(1, 1, 40, 40).triu(1).bool()

    def gradients() -> list[Tensor]:
        output = core(*states, mask)
        found: tuple[Tensor, ...] = torch.autograd.grad((output.float() ** 2).sum(), states)
        return [one.float().flatten() for one in found]

    native = gradients()
    with llama_engines.engines[PolicyRole.TRAINING].bind(llama_engines.reference(PolicyRole.TRAINING, KERNEL)):
        bound = gradients()
    for ours, theirs in zip(bound, native, strict=True):
        assert not torch.equal(ours, theirs)
        assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.999
