"""Do the linear layers make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="gemm.accumulation",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Do the linear layers (precision, order of their sums, how many rows they get) cause the mismatch?",
    switch=Switch(path="operator.linear.implementation", allowed=("native", "reference")),
    # The native product of no fewer than four rows is no second reference: its bits would be observed, not constructed.
    # Nor is it cheaper from a few rows on. Measured on three of SmolLM2's four shapes, one thread of a CPU without bf16
    # instructions, against this one: 0.8 to 1.0 times as long for 1 row, 1.5 to 1.9 for 8, 4.9 to 5.6 for 208.
    references=(
        ReferenceImplementation(
            name="fixed_tile",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU; not run on a GPU yet",
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
