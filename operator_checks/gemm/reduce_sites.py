"""Where the fixed tree goes in each live engine.

Written against vllm 0.32 (``RowParallelLinear.forward``, which leaves its part unreduced where ``reduce_results`` is
off) and megatron-core 0.16 (``RowParallelLinear.forward``, likewise where ``explicit_expert_comm`` is on). The product
is the engine's own, and so is the all-gather. Only a pass that is repeated under another environment gathers over a
process group made here, since a communicator reads its variables once, when it is built.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mismatch_hooks.pipeline.bind import BindingError, PatchSite
from mismatch_hooks.schema.enums import PolicyRole

_LINEARS = {
    PolicyRole.ROLLOUT: ("model.layers", ("self_attn.o_proj", "mlp.down_proj")),
    PolicyRole.TRAINING: ("decoder.layers", ("self_attention.linear_proj", "mlp.linear_fc2")),
}
# The flag of the linear, and the value at which its forward returns this rank's part.
_UNREDUCED = {PolicyRole.ROLLOUT: ("reduce_results", False), PolicyRole.TRAINING: ("explicit_expert_comm", True)}

_Forward = Callable[..., Any]


def sites(factor: str, role: PolicyRole, model: Any, parameters: Mapping[str, object]) -> Sequence[PatchSite]:
    """Return the two row-parallel linears of every layer, each of which is called and reduced once a forward.

    Args:
        factor: ``"gemm.forward_reduce"``.
        role: which engine ``model`` belongs to.
        model: vLLM's model module on this rank, or the ``GPTModel``.
        parameters: ``repeated_under`` of them, the variables of a repeat; every rank gets the same.

    Raises:
        BindingError: nothing is reduced over ranks, or a layer reduces in a way that the tree does not cover.
    """
    layers, paths = _LINEARS[role]
    first, rest = layers.split(".")
    found: list[PatchSite] = []
    variables = parameters.get("repeated_under", {})
    if not isinstance(variables, Mapping):
        raise BindingError(f"repeated_under: got {variables!r}; accepts variables and their values.")
    for index, layer in enumerate(getattr(getattr(model, first), rest)):
        if type(layer).__name__ == "PPMissingLayer":  # another pipeline stage has it
            continue
        for path in paths:
            linear = _at(layer, path)
            _require_all_reduce(role, f"{layers}.{index}.{path}", linear)
            found.append(
                PatchSite(
                    factor=factor,
                    site=f"{layers}.*.{path}: all-reduce",
                    owner=linear,
                    name="forward",
                    build=_tree(role, linear, variables),
                    calls_per_forward=1,
                )
            )
    return found


def _require_all_reduce(role: PolicyRole, name: str, linear: Any) -> None:
    if role is PolicyRole.ROLLOUT:
        from vllm.model_executor.layers.linear import RowParallelLinear as Expected

        reduces = type(linear) is Expected and linear.reduce_results
    else:
        from megatron.core.tensor_parallel import RowParallelLinear as Expected

        # With a bias of its own the linear would add it once a rank while its part is not reduced.
        reduces = type(linear) is Expected and not linear.explicit_expert_comm and linear.skip_bias_add
    if not reduces or getattr(linear, "sequence_parallel", False):
        raise BindingError(
            f"the {role.value} model's {name} is a {type(linear).__name__} that does not end in a plain all-reduce; "
            "the fixed tree covers RowParallelLinear of dense layers, without sequence_parallel."
        )
    ranks = _ranks(linear)
    if ranks == 1:
        raise BindingError(
            f"the {role.value} model adds nothing up over ranks (tensor-parallel size 1); give both sides one size of "
            "2 or more, or leave gemm.forward_reduce out."
        )


def _ranks(linear: Any) -> int:
    return int(linear.tp_size if hasattr(linear, "tp_size") else linear.tp_group.size())


def _at(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def _tree(role: PolicyRole, linear: Any, variables: Mapping[str, str]) -> Callable[[_Forward], _Forward]:
    from mismatch_hooks.references.reduction import tree_sum

    flag, unreduced = _UNREDUCED[role]
    repeated = _group_under(role, linear, variables) if variables else None

    def build(original: _Forward) -> _Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            setattr(linear, flag, unreduced)
            try:
                returned = original(*args, **kwargs)
            finally:
                setattr(linear, flag, not unreduced)
            part = returned[0] if isinstance(returned, tuple) else returned
            if repeated is None:
                parts = _gathered(role, linear, part).chunk(_ranks(linear), dim=-1)
            else:
                parts = _gathered_over(repeated, part)
            total = tree_sum(parts)
            return (total, *returned[1:]) if isinstance(returned, tuple) else total

        return forward

    return build


# By role and variables: the engine's own group and the one that was made like it in their environment.
_REPEATED: dict[tuple[PolicyRole, tuple[tuple[str, str], ...]], tuple[Any, Any]] = {}


def _group_under(role: PolicyRole, linear: Any, variables: Mapping[str, str]) -> Any:
    """The group of the same ranks, built while ``variables`` are in force; entered by every rank of it."""
    import torch.distributed as dist

    own = linear.tp_group if role is PolicyRole.TRAINING else _rollout_group()
    key = role, tuple(sorted(variables.items()))
    found = _REPEATED.get(key)
    if found is None or found[0] is not own:
        ranks = dist.get_process_group_ranks(own)
        made = dist.new_group(ranks, backend=dist.get_backend(own), use_local_synchronization=True)
        found = _REPEATED[key] = (own, made)
    return found[1]


def _rollout_group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().device_group


def _gathered_over(group: Any, part: Any) -> Sequence[Any]:
    """Every rank's part, in the order of ranks; carries no gradient, since a repeat only scores."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return parts


def _gathered(role: PolicyRole, linear: Any, part: Any) -> Any:
    """Every rank's part side by side along the last dimension, in the order of ranks; the gradient is this rank's."""
    if role is PolicyRole.ROLLOUT:
        from vllm.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(part)
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(part, group=linear.tp_group)
