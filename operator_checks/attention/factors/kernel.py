"""Does the kernel that attends make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="attention.kernel",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the attention kernel (its precision, its softmax scale, the order of its sums) cause the mismatch?",
    switch=Switch(path="operator.attention.kernel", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="tiled",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU; not run on a GPU yet",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.self_attn.attn.impl"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.self_attention.core_attention"),
    ),
    required_evidence=("model shape",),
    pitfalls=("dropout_active", "weights_differ"),
    recommendation=(
        "Check on the {side} side that scores are scaled by 1 / sqrt(head dim), and that scores, softmax and sums stay "
        "in fp32 until one rounding at the end; where they do, what is left is the order of the sums, which only one "
        "kernel for both sides makes equal: keep attention.kernel in align."
    ),
)
