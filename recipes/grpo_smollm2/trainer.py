"""The training side: a megatron-core model, AdamW on fp32 masters, and the log-probs of sampled tokens."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from recipes.grpo_smollm2.config import Config
from recipes.grpo_smollm2.cpu_bf16 import has_bf16_products, multiply_through_fp32
from recipes.grpo_smollm2.errors import RecipeError
from recipes.grpo_smollm2.grpo import Batch
from recipes.grpo_smollm2.model_file import ModelShape, read_shape
from recipes.grpo_smollm2.weights import to_hugging_face, to_megatron


class Trainer:
    """The policy under training.

    Attributes:
        model: the megatron-core model, in training mode; dropout is 0, so evaluation mode would give the same bits.
        shape: what its model file declares.
        optimizer: AdamW over ``masters``.
        masters: fp32 copies of the parameters, by megatron-core's names; what the optimizer really updates.
        weight_version: label of the present weights: how many optimizer steps have been taken.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        start_megatron(seed=config.seed)
        if not has_bf16_products():
            multiply_through_fp32()
        self.shape = read_shape(folder)
        self._folder = folder
        self._dtype = getattr(torch, config.model.dtype)
        self.model = self._build()
        self.masters = {
            name: torch.nn.Parameter(parameter.detach().float().clone())
            for name, parameter in self.model.named_parameters()
        }
        self.weight_version = "0"
        self._max_grad_norm = config.optimizer.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self._initial = self._build().eval() if config.grpo.kl_coefficient else None

    def token_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs of the sampled tokens under the present weights, from the model's own logits.

        Returns:
            ``[batch, response]`` fp32, nats; 0 on padding. Carries the gradient where gradients are on.
        """
        return token_logprobs(self.model, batch)

    @torch.no_grad()
    def initial_logprobs(self, batch: Batch) -> Tensor:
        """The same under the initial weights; only in a run whose ``kl_coefficient`` is above 0."""
        assert self._initial is not None
        return token_logprobs(self._initial, batch)

    def update(self) -> float:
        """Take one optimizer step with the gradients of the last backward; returns their norm before clipping."""
        for name, parameter in self.model.named_parameters():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        self.weight_version = str(int(self.weight_version) + 1)
        return float(norm)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The present weights under Hugging Face's names and layouts, for the rollout engine."""
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return to_hugging_face(tensors, self.shape)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on besides the weights: masters, both moments, step counts."""
        state: dict[str, Tensor] = {f"master.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            state |= {f"{key}.{name}": value for key, value in self.optimizer.state[master].items()}
        return state

    def close(self) -> None:
        """Leave the process group."""
        parallel_state.destroy_model_parallel()
        # vLLM takes the group down with itself when its engine core runs in this process.
        if dist.is_initialized():
            dist.destroy_process_group()

    def _build(self) -> GPTModel:
        model = build_model(self.shape, dtype=self._dtype)
        checkpoint = dict(to_megatron(load_file(self._folder / "model.safetensors"), self.shape))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(checkpoint[name])
        return model.cuda() if torch.cuda.is_available() else model


def start_megatron(*, seed: int) -> None:
    """Join the process group and set megatron-core up for one rank.

    Raises:
        RecipeError: a launcher started more than one rank.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != 1:
        raise RecipeError(
            f"WORLD_SIZE: got {ranks}; accepts 1: this loop trains in one process, start it without a launcher."
        )
    # A store inside the process: one rank needs no port, so no other run can hold it.
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return
    # Two places of megatron-core ask for a CUDA device on any host: the rotary table, for the device to put itself on,
    # and attention, which forks the CUDA random state for its dropout. Dropout is 0 here, so the fork may do nothing.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def build_model(shape: ModelShape, *, dtype: torch.dtype) -> GPTModel:
    """A model of this shape with every constant from the model file; its weights are not set yet."""
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        # The three that megatron-core would otherwise fill in with 1e-5, 0.1 and 0.1.
        layernorm_epsilon=shape.norm_eps,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        # Fused kernels need CUDA.
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm),
        vocab_size=shape.vocabulary,
        max_sequence_length=1024,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 1.0,
        share_embeddings_and_output_weights=shape.tied,
    )
    # The norms of the local layers are made in fp32 whatever params_dtype says.
    return model.to(dtype)


def token_logprobs(model: GPTModel, batch: Batch) -> Tensor:
    """fp32 log-probs of a batch's sampled tokens; see ``Trainer.token_logprobs``."""
    device = next(model.parameters()).device
    input_ids = batch.input_ids.to(device)
    sequence = input_ids.shape[1]
    positions = torch.arange(sequence, device=device).expand_as(input_ids)
    # Given, because megatron-core makes its default mask on a CUDA device. True hides a key.
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device).triu(1)
    logits = model(input_ids, positions, mask)
    # The logits at position p are those of token p + 1. Only sampled tokens are kept: the fp32 copy is the big one.
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    chosen = logits[rows, batch.prompt_lengths[rows] - 1 + columns].float().log_softmax(dim=-1)
    sampled = batch.response_ids[rows, columns].to(device)
    logprobs = chosen.gather(1, sampled[:, None])[:, 0]
    padded = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=device)
    return padded.masked_scatter(batch.response_mask.to(device), logprobs)
