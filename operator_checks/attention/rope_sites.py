"""Where the rotary references go in each live engine.

Written against vllm 0.32 (``RotaryEmbedding._forward_method``, stored at construction: a patched class never runs) and
megatron-core 0.16 (``megatron.core.transformer.attention.apply_rotary_pos_emb``, looked up by name per call).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.model_meta.correspondence import rollout_name
from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.pipeline.operator_call import Operands, OperatorCall
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.replay import NotReplayableError
from mismatch_hooks.schema.shape import ModelShape

_ROLLOUT_SITE = "model.layers.*.self_attn.rotary_emb"
_TRAINING_SITE = "decoder.layers.*.self_attention: apply_rotary_pos_emb"


def parameters(shape: ModelShape) -> Mapping[str, object]:
    """Return theta, rotary dim and scaling of the model file: one truth for both roles, whatever their tables hold."""
    return {"theta": shape.rope_theta, "rotary_dim": shape.head_dim, "scaling": shape.rope_scaling}


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the rotary call sites of a live model.

    Args:
        factor: ``"attention.rope_fusion"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: as ``parameters()`` gives them, plus ``implementation``.

    Raises:
        BindingError: the model's rope has a form that the reference does not cover.
    """
    if role is PolicyRole.ROLLOUT:
        return _rollout_sites(factor, model, parameters)
    return _training_sites(factor, model, parameters)


def _rollout_sites(factor: str, model: Any, parameters: Mapping[str, object]) -> list[PatchSite]:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        rotary = vars(module).get("_modules", {}).get("rotary_emb")
        if rotary is not None:
            users.setdefault(id(rotary), []).append(f"{name}.rotary_emb")
    # modules() yields a shared rotary module once; every layer that uses it calls it.
    found = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    for module in found:
        if not module.is_neox_style:
            raise BindingError(
                "the rollout's rotary embedding interleaves pairs; the rope references rotate halves only."
            )
    build = (
        _rollout_shared(parameters) if parameters["implementation"] == "shared_backend" else _rollout_fp32(parameters)
    )
    return [
        PatchSite(
            factor=factor,
            site=_ROLLOUT_SITE,
            owner=module,
            name="_forward_method",
            build=build,
            calls_per_forward=len(users.get(id(module), ())),
            call=_rollout_call(users.get(id(module), [_ROLLOUT_SITE]), int(parameters["rotary_dim"])),  # type: ignore[call-overload]
        )
        for module in found
    ]


def _training_sites(factor: str, model: Any, parameters: Mapping[str, object]) -> list[PatchSite]:
    from megatron.core.transformer import attention

    config = model.config
    for name in ("multi_latent_attention", "rotary_interleaved", "fused_single_qkv_rope"):
        if getattr(config, name, False):
            raise BindingError(f"the trainer's TransformerConfig sets {name}; the rope references do not cover it.")
    if config.context_parallel_size > 1:
        raise BindingError(
            f"context_parallel_size is {config.context_parallel_size}; the rope references see one contiguous "
            "sequence, so ablate with context_parallel_size 1."
        )
    build = (
        _training_shared(parameters) if parameters["implementation"] == "shared_backend" else _training_fp32(parameters)
    )
    layers = len(model.decoder.layers)
    return [
        PatchSite(
            factor=factor,
            site=_TRAINING_SITE,
            owner=attention,
            name="apply_rotary_pos_emb",
            build=build,
            calls_per_forward=2 * layers,  # queries and keys
            call=_training_call(model, layers),
        )
    ]


def _table(parameters: Mapping[str, object]) -> Any:
    from mismatch_hooks.references.rope import RotaryTable, UnsupportedRopeError, inverse_frequencies

    try:
        inverse = inverse_frequencies(
            theta=float(parameters["theta"]),  # type: ignore[arg-type]
            rotary_dim=int(parameters["rotary_dim"]),  # type: ignore[call-overload]
            scaling=parameters["scaling"],  # type: ignore[arg-type]
        )
    except UnsupportedRopeError as error:
        raise BindingError(str(error)) from error
    return RotaryTable(inverse)


def _rollout_fp32(parameters: Mapping[str, object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    import torch

    from mismatch_hooks.references.rope import rotate

    table, head_dim = _table(parameters), int(parameters["rotary_dim"])  # type: ignore[call-overload]

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def rope(positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
            cos, sin = table.at(positions.flatten())
            heads = query.reshape(query.shape[0], -1, head_dim)
            if key is None:
                return rotate(heads, cos, sin).reshape(query.shape), None
            # Together, for half as many small operations: each head's bits are its own.
            both = rotate(torch.cat((heads, key.reshape(key.shape[0], -1, head_dim)), dim=1), cos, sin)
            return both[:, : heads.shape[1]].reshape(query.shape), both[:, heads.shape[1] :].reshape(key.shape)

        return rope

    return build


def _training_fp32(parameters: Mapping[str, object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    from mismatch_hooks.references.rope import rotate

    table = _table(parameters)

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def rope(
            t: Any, freqs: Any, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, cp_group: Any = None
        ) -> Any:
            _refuse_packed(cu_seqlens, mscale)
            # Row i of [sequence, batch, heads, head dim] is rotated by position i: megatron-core reads no position ids.
            cos, sin = table.first(t.shape[0], t.device)
            return rotate(t, cos[: t.shape[0], None, None], sin[: t.shape[0], None, None])

        return rope

    return build


def _rollout_shared(parameters: Mapping[str, object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    import torch
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    table, head_dim = _table(parameters), int(parameters["rotary_dim"])  # type: ignore[call-overload]

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def rope(positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
            cos, sin = table.first(int(positions.max()) + 1, query.device)
            rotated, rotated_key = apply_rope_with_cos_sin_cache(
                positions=positions.flatten(),
                query=query,
                key=key if key is not None else torch.empty_like(query[..., :head_dim]),
                head_size=head_dim,
                cos_sin_cache=torch.cat((cos, sin), dim=-1),
                is_neox=True,
            )
            return rotated, rotated_key if key is not None else None

        return rope

    return build


def _training_shared(parameters: Mapping[str, object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    import torch
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    table = _table(parameters)

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def rope(
            t: Any, freqs: Any, config: Any, cu_seqlens: Any = None, mscale: float = 1.0, cp_group: Any = None
        ) -> Any:
            _refuse_packed(cu_seqlens, mscale)
            angles = torch.arange(t.shape[0], device=t.device, dtype=torch.float32)[:, None] * table.inverse.to(
                t.device
            )
            phases = torch.cat((angles, angles), dim=-1)[:, None, None]
            return apply_rotary_pos_emb(t, phases, tensor_format="sbhd", interleaved=False, fused=True)

        return rope

    return build


def _refuse_packed(cu_seqlens: Any, mscale: float) -> None:
    if cu_seqlens is not None:
        raise BindingError("the trainer packs sequences (cu_seqlens is given); the rope references take unpacked rows.")
    if mscale != 1.0:
        raise BindingError(f"the trainer's rope asks for mscale {mscale}; the rope references know 1.0 only.")


def _rollout_call(places: Sequence[str], head_dim: int) -> OperatorCall:
    import torch

    def heads(states: Any) -> Any:
        return states.reshape(states.shape[0], -1, head_dim)

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named = dict(zip(("positions", "query", "key"), args, strict=False)) | dict(kwargs)
        states = [heads(named[name]) for name in ("query", "key") if named.get(name) is not None]
        return {"positions": named["positions"].flatten(), "states": torch.cat(states, dim=1)}

    def play(rope: Callable[..., Any], operands: Operands) -> Any:
        # All heads are given as queries, and one more as the key that the kernel wants to see.
        states = operands["states"]
        rotated, _ = rope(operands["positions"], states.flatten(1), states[:, 0].clone())
        return rotated, None

    def result(returned: Any) -> Any:
        return torch.cat([heads(states) for states in returned if states is not None], dim=1)

    return OperatorCall(places=tuple(places), take=take, play=play, result=result)


def _training_call(model: Any, layers: int) -> OperatorCall:
    import torch

    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        states = args[0] if args else kwargs["t"]
        if states.shape[1] != 1:
            return None
        return {"positions": torch.arange(states.shape[0], device=states.device), "states": states[:, 0]}

    def play(rope: Callable[..., Any], operands: Operands) -> Any:
        states, positions = operands["states"], operands["positions"]
        if not torch.equal(positions, torch.arange(len(states), device=states.device)):
            raise NotReplayableError("megatron-core rotates row i by position i, and these are not in that order")
        return rope(
            states[:, None], model.rotary_pos_emb(len(states)), config=model.config, cp_group=model.pg_collection.cp
        )

    names = (rollout_name(f"decoder.layers.{index // 2}.self_attention") for index in range(2 * layers))
    return OperatorCall(places=tuple(names), take=take, play=play, result=lambda rotated: rotated[:, 0])
