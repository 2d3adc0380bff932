"""Effective values come from live modules; a request that took no effect is marked, whatever the config repeats."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend, token_logprobs
from mismatch_hooks.schema.enums import PolicyRole, Source
from mismatch_hooks.schema.readback import NOTHING_REQUESTED, Reading, Unobservable
from mismatch_hooks.schema.shape import ModelShape
from tests.integrations.megatron.tiny_gpt import LLAMA, QWEN3, build_model, sequences

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron")]

LLAMA3_FACTOR_32 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def reading(model: Any, key: str, shape: ModelShape | None = LLAMA, **keywords: Any) -> Reading:
    found = MegatronBackend(model, shape=shape, **keywords).read_back().settings[key]
    assert isinstance(found, Reading), found
    return found


def unobservable(model: Any, key: str, shape: ModelShape | None = LLAMA, **keywords: Any) -> Unobservable:
    found = MegatronBackend(model, shape=shape, **keywords).read_back().settings[key]
    assert isinstance(found, Unobservable), found
    return found


@pytest.fixture
def llama(megatron: None) -> Any:
    return build_model(LLAMA)


def test_a_right_model_differs_from_its_file_in_nothing(megatron: None) -> None:
    for shape in (LLAMA, QWEN3):
        readback = MegatronBackend(build_model(shape), shape=shape, weight_version=lambda: "3").read_back()
        assert readback.role is PolicyRole.TRAINING
        readings = {key: found for key, found in readback.settings.items() if isinstance(found, Reading)}
        assert [key for key, found in readings.items() if found.differs_from_request] == []
        assert {key: readings[key].effective for key in EXPECTED} == EXPECTED | {
            "model.norm.epsilon": shape.norm_epsilon,
            "model.tied_embeddings": shape.tied_embeddings,
        }
        assert readings["weights.version"].effective == "3"
        assert readings["library.megatron-core"].effective.startswith("0.16.")


LAYERS = "megatron.core.tensor_parallel.layers"
EXPECTED: dict[str, object] = {
    "model.dtype": "bfloat16",
    "model.head.dtype": "bfloat16",
    "model.vocab.size": 512,
    "model.vocab.padded_size": 512,
    "model.vocab.logits_width": 512,
    "model.norm.epsilon": None,
    "model.rope.theta": 1e4,
    "model.rope.scaling_type": "default",
    "model.rope.scaling_factor": 1.0,
    "model.rope.inverse_frequency_last": float(torch.tensor(1.0) / 1e4 ** torch.tensor(30 / 32)),
    "model.rope.fused": False,
    "model.layers": 2,
    "model.tied_embeddings": None,
    "operator.attention.implementation": "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "operator.rope.implementation": "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_bshd",
    "operator.norm.implementation": "torch.nn.modules.normalization.RMSNorm",
    "operator.activation.implementation": "gated torch.nn.functional.silu",
    "operator.linear.implementation": {
        "linear_qkv": f"{LAYERS}.ColumnParallelLinear",
        "linear_proj": f"{LAYERS}.RowParallelLinear",
        "linear_fc1": f"{LAYERS}.ColumnParallelLinear",
        "linear_fc2": f"{LAYERS}.RowParallelLinear",
    },
    "operator.embedding.implementation": f"{LAYERS}.VocabParallelEmbedding",
    "operator.head.implementation": f"{LAYERS}.ColumnParallelLinear",
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.data": 1,
    "parallel.context": 1,
    "parallel.sequence": False,
    "engine.compiled": False,
    "engine.cuda_graphs": "none",
    "engine.device": "cpu",
    "training.mode": "train",
    "training.dropout.attention": 0.0,
    "training.dropout.hidden": 0.0,
    "training.recompute": "none",
    "training.attention_backend": "DotProductAttention",
    "training.softmax_in_fp32": True,
    "training.fusion.masked_softmax": False,
    "training.fusion.bias_activation": False,
    "training.fusion.bias_dropout": False,
    "training.fusion.gradient_accumulation": False,
    "training.fusion.persist_layer_norm": False,
    "training.fusion.rope": False,
    "training.deterministic_algorithms": False,
    "training.logprobs.function": "mismatch_hooks.integrations.megatron.token_logprobs",
    "training.logprobs.micro_batch": 8,
}


def test_C17_an_attention_backend_that_did_not_take_effect_is_marked(megatron: None) -> None:
    from megatron.core.transformer.enums import AttnBackend

    found = reading(build_model(LLAMA, attention_backend=AttnBackend.flash), "training.attention_backend")
    assert (found.requested, found.effective) == ("flash", "DotProductAttention")
    assert found.requested_by == "TransformerConfig.attention_backend=flash"
    assert found.source is Source.LIVE_MODULE
    assert found.differs_from_request


def test_C17_control_the_local_backend_asks_for_what_the_local_spec_builds(megatron: None) -> None:
    from megatron.core.transformer.enums import AttnBackend

    found = reading(build_model(LLAMA, attention_backend=AttnBackend.local), "training.attention_backend")
    assert not found.differs_from_request


def test_C19_a_rope_factor_left_at_its_default_is_marked(megatron: None) -> None:
    shape = replace(LLAMA, rope_scaling=LLAMA3_FACTOR_32)
    model = build_model(LLAMA, model={"rope_scaling": True})
    factor = reading(model, "model.rope.scaling_factor", shape)
    assert (factor.requested, factor.requested_by, factor.effective) == (32.0, "model file", 8.0)
    assert (factor.source, factor.where) == (Source.CLASS_DEFAULT, "inverse frequencies of RotaryEmbedding")
    last = reading(model, "model.rope.inverse_frequency_last", shape)
    assert last.effective == pytest.approx(2.2228e-5, rel=1e-4)
    assert last.requested == pytest.approx(5.557e-6, rel=1e-4)
    assert factor.differs_from_request and last.differs_from_request
    kind = reading(model, "model.rope.scaling_type", shape)
    assert (kind.effective, kind.differs_from_request) == ("llama3", False)


def test_C19_control_a_rope_factor_that_was_passed_on_is_quiet(megatron: None) -> None:
    shape = replace(LLAMA, rope_scaling=LLAMA3_FACTOR_32)
    settings = (
        MegatronBackend(build_model(LLAMA, model={"rope_scaling": True, "rope_scaling_factor": 32.0}), shape=shape)
        .read_back()
        .settings
    )
    for key in ("theta", "scaling_type", "scaling_factor", "inverse_frequency_last"):
        found = settings[f"model.rope.{key}"]
        assert isinstance(found, Reading) and found.requested_by == "model file" and not found.differs_from_request


def test_a_wrong_theta_is_read_from_the_table(megatron: None) -> None:
    model = build_model(LLAMA, model={"rotary_base": 500000})
    found = reading(model, "model.rope.theta")
    assert (found.requested, found.effective, found.source) == (1e4, 5e5, Source.LIVE_MODULE)


def test_a_cached_rotary_table_outlives_its_frequencies_and_is_what_counts(llama: Any) -> None:
    key = "model.rope.inverse_frequency_last"
    backend = MegatronBackend(llama, shape=LLAMA)
    right = backend.read_back().effective(key)
    native = backend.score(sequences((4, 4)))
    llama.rotary_pos_emb.inv_freq = llama.rotary_pos_emb.inv_freq / 2
    assert backend.score(sequences((4, 4))).shards == native.shards  # megatron-core caches its tables by length
    assert backend.read_back().effective(key) == right
    backend.score(sequences((4, 5)))  # another length makes a new table
    assert backend.read_back().effective(key) == right / 2


def test_C19_an_epsilon_left_at_its_default_is_marked(megatron: None) -> None:
    found = reading(build_model(QWEN3, layernorm_epsilon=1e-5), "model.norm.epsilon", QWEN3)
    assert (found.requested, found.requested_by, found.effective) == (1e-6, "model file", 1e-5)
    assert (found.source, found.where) == (Source.CLASS_DEFAULT, "9 modules of class RMSNorm")
    assert found.differs_from_request


def test_an_epsilon_of_one_norm_is_named_by_its_module(llama: Any) -> None:
    llama.decoder.layers[1].pre_mlp_layernorm.eps = 1e-3
    assert reading(llama, "model.norm.epsilon").effective == {
        "decoder.layers.0.input_layernorm": 1e-5,
        "decoder.layers.0.pre_mlp_layernorm": 1e-5,
        "decoder.layers.1.input_layernorm": 1e-5,
        "decoder.layers.1.pre_mlp_layernorm": 1e-3,
        "decoder.final_layernorm": 1e-5,
    }


def test_without_a_model_file_the_config_is_what_was_asked_for(llama: Any) -> None:
    llama.decoder.final_layernorm.eps = 1e-3
    found = reading(llama, "model.norm.epsilon", None)
    assert (found.requested, found.requested_by) == (1e-5, "TransformerConfig.layernorm_epsilon")
    assert reading(llama, "model.rope.theta", None).requested == NOTHING_REQUESTED
    assert unobservable(llama, "model.vocab.size", None).reason == (
        "no model shape was given; pass shape= to MegatronBackend"
    )


@pytest.mark.parametrize(
    ("own", "width"),
    [
        pytest.param(None, 512, id="our function masks the padding"),
        pytest.param(lambda model, ids: token_logprobs(model, ids), 640, id="the loop's function does not"),
        pytest.param(lambda model, ids: token_logprobs(model, ids, vocab_size=512), 512, id="the loop's function does"),
    ],
)
def test_a_padded_vocabulary_shows_what_is_normalised(megatron: None, own: Any, width: int) -> None:
    model = build_model(LLAMA, padded_vocab=640)
    settings = MegatronBackend(model, shape=LLAMA, token_logprobs=own).read_back()
    assert settings.effective("model.vocab.size") == 512
    assert settings.effective("model.vocab.padded_size") == 640
    assert settings.effective("model.vocab.logits_width") == width
    assert not model.output_layer._forward_hooks


def test_a_transformed_logit_leaves_the_width_unobservable(megatron: None) -> None:
    model = build_model(LLAMA, padded_vocab=640)
    found = unobservable(
        model, "model.vocab.logits_width", token_logprobs=lambda model, ids: token_logprobs(model, ids) * 0.7
    )
    assert found.reason.startswith("the log-probs follow log_softmax over neither 512 nor 640 columns")


def test_dropout_and_mode_are_read_where_they_act(megatron: None) -> None:
    model = build_model(LLAMA, attention_dropout=0.1, hidden_dropout=0.1)
    model.decoder.layers[0].self_attention.core_attention.attention_dropout.p = 0.0
    model.decoder.layers[1].hidden_dropout = 0.0
    settings = MegatronBackend(model, shape=LLAMA).read_back()
    assert settings.effective("training.dropout.attention") == {
        f"decoder.layers.{layer}.self_attention.core_attention.attention_dropout": p
        for layer, p in ((0, 0.0), (1, 0.1))
    }
    assert settings.effective("training.dropout.hidden") == {"decoder.layers.0": 0.1, "decoder.layers.1": 0.0}
    model.eval()
    assert MegatronBackend(model).read_back().effective("training.mode") == "eval"
    model.decoder.layers[0].train()
    mixed = MegatronBackend(model).read_back().effective("training.mode")
    assert mixed["decoder.layers.0.mlp"] == "train" and mixed["decoder.layers.1.mlp"] == "eval"


def test_a_norm_kept_in_fp32_is_named(llama: Any) -> None:
    llama.decoder.final_layernorm.float()
    effective = reading(llama, "model.dtype").effective
    assert {name for name, dtype in effective.items() if dtype == "float32"} == {"decoder.final_layernorm.weight"}


def test_a_replaced_forward_shows_in_the_implementation(llama: Any) -> None:
    def louder(states: Any) -> Any:
        return states

    llama.decoder.final_layernorm.forward = louder
    effective = reading(llama, "operator.norm.implementation").effective
    assert effective["decoder.final_layernorm"].endswith("RMSNorm with forward replaced by " + _name(louder))
    assert effective["decoder.layers.0.input_layernorm"].endswith("RMSNorm")


def test_a_replaced_rotary_function_shows(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer import attention

    def mine(*arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(attention, "apply_rotary_pos_emb", mine)
    assert reading(llama, "operator.rope.implementation").effective == _name(mine)


def test_recompute_is_read_in_one_line(megatron: None) -> None:
    full = build_model(LLAMA, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert reading(full, "training.recompute").effective == "full, uniform 1"
    selective = build_model(LLAMA, recompute_granularity="selective")
    assert reading(selective, "training.recompute").effective == "selective, core_attn"


def test_the_softmax_flag_comes_from_the_live_softmax(llama: Any) -> None:
    llama.decoder.layers[0].self_attention.core_attention.scale_mask_softmax.softmax_in_fp32 = False
    found = reading(llama, "training.softmax_in_fp32")
    assert (found.requested, found.differs_from_request) == (True, True)


def test_a_compiled_model_says_so(llama: Any) -> None:
    llama.decoder.layers[1].mlp.compile()
    found = reading(llama, "engine.compiled")
    assert (found.effective, found.where) == (True, "1 of the modules, first decoder.layers.1.mlp")


def test_cuda_settings_are_not_guessed_on_a_cpu(llama: Any) -> None:
    for key in ("training.matmul.tf32", "training.matmul.reduced_precision_reduction"):
        assert unobservable(llama, key).reason == "the model is on the CPU; the setting concerns CUDA products only"


def test_process_settings_are_those_of_now(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = MegatronBackend(llama).read_back().settings
    assert "environment.CUBLAS_WORKSPACE_CONFIG" not in settings
    algorithm, threads = settings["environment.NCCL_ALGO"], settings["engine.threads"]
    assert isinstance(algorithm, Reading) and algorithm.effective == os.environ["NCCL_ALGO"]
    assert isinstance(threads, Reading) and threads.effective == torch.get_num_threads()
    assert isinstance(settings["library.transformer-engine"], Unobservable)


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"
