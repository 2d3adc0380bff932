"""Do the norms of queries and keys, one per head, make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Prerequisites, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="norm.qk_norm",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the per-head norm of queries and keys (its epsilon, its precision, its weights) cause the mismatch?",
    switch=Switch(path="operator.qk_norm.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fp32",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.self_attn.{q_norm,k_norm}"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.self_attention.{q_layernorm,k_layernorm}"),
    ),
    prerequisites=Prerequisites(required_model_traits=("rmsnorm", "qk_norm")),
    required_evidence=("model shape",),
    pitfalls=("weights_differ",),
    recommendation=(
        "Check that the {side} side normalises each head on its own, before rope, with the weights and rms_norm_eps of "
        "the model file; if it does, keep this norm in fp32 there until after its weight."
    ),
)
