"""Do the RMS norms of the residual stream make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Prerequisites, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="norm.rmsnorm",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the RMSNorm (its epsilon, its precision, where it rounds, its residual add) cause the mismatch?",
    switch=Switch(path="operator.norm.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fp32",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(
            role=PolicyRole.ROLLOUT, name="model.layers.*.{input_layernorm,post_attention_layernorm} and model.norm"
        ),
        CallSite(
            role=PolicyRole.TRAINING,
            name="decoder.layers.*.{input_layernorm,pre_mlp_layernorm} and decoder.final_layernorm",
        ),
    ),
    prerequisites=Prerequisites(required_model_traits=("rmsnorm",)),
    required_evidence=("model shape",),
    pitfalls=("weights_differ",),
    recommendation=(
        "Compare model.norm.epsilon in the readback of the {side} side with rms_norm_eps in the model file first; if "
        "they agree, keep the norm in fp32 there until after its weight (one rounding, of the product), and normalise "
        "the residual sum as it is stored."
    ),
)
