"""Does the all-reduce behind the row-parallel linears make rollout and training disagree?"""

from mismatch_hooks.schema.enums import DeterminismLevel, ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import (
    CallSite,
    MismatchFactor,
    ReferenceImplementation,
    Switch,
)

# The third all-reduce of a forward, that of the embedding, adds zeros to the one rank that has the word: no order of
# it can round. That of a MoE layer's output is not covered, and the adapter refuses such a model by name.
FACTOR = MismatchFactor(
    id="gemm.forward_reduce",
    category=FactorCategory.SHARDING_AND_REDUCTION,
    question="Does adding up the tensor-parallel ranks' parts (its order, its precision) cause the mismatch?",
    switch=Switch(path="operator.linear.reduction", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fixed_tree",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            determinism=DeterminismLevel.STABLE_ACROSS_TOPOLOGY,
            verified_on="CPU; not run on a GPU yet",
        ),
    ),
    required_evidence=("collective contract",),
    # NCCL reads these when a communicator is built, so the adapter builds one in each. Other backends read neither.
    repeat_under={"NCCL_ALGO": ("Ring", "Tree")},
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.self_attn.o_proj: all-reduce"),
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.mlp.down_proj: all-reduce"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.self_attention.linear_proj: all-reduce"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.mlp.linear_fc2: all-reduce"),
    ),
    pitfalls=("weights_differ",),
    recommendation=(
        "Pin the collective's algorithm and precision on the {side} side (NCCL_ALGO, and no quantised or one-shot "
        "all-reduce), or give both sides one rank."
    ),
)
