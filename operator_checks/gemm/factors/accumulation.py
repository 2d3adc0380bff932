"""Do the linear layers make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="gemm.accumulation",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Do the linear layers (precision, order of their sums, how many rows they get) cause the mismatch?",
    switch=Switch(path="operator.linear.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fixed_tile",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU; not run on a GPU yet",
        ),
        # Cheaper, and equal only as far as anybody has looked: never chosen unless it is named.
        ReferenceImplementation(
            name="padded_native",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU, by observation; not run on a GPU yet",
        ),
    ),
    call_sites=(
        CallSite(
            role=PolicyRole.ROLLOUT,
            name="model.layers.*.{self_attn.qkv_proj,self_attn.o_proj,mlp.gate_up_proj,mlp.down_proj}",
        ),
        CallSite(
            role=PolicyRole.TRAINING,
            name="decoder.layers.*.{self_attention.linear_qkv,self_attention.linear_proj,mlp.linear_fc1,mlp.linear_fc2}",
        ),
    ),
    pitfalls=("weights_differ",),
    recommendation=(
        "Check on the {side} side that products accumulate in fp32 and that reduced-precision reduction and TF32 are "
        "off; where they are, what is left is that the kernel's sums depend on how many rows it gets: use "
        "batch-invariant products there."
    ),
)
