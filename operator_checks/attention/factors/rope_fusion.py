"""Does the implementation of the rotary embedding make rollout and training disagree?"""

from mismatch_hooks.schema.contract import DEFAULT_RULES, ComparisonRule
from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import (
    CallSite,
    LibraryPin,
    MismatchFactor,
    Prerequisites,
    ReferenceImplementation,
    Switch,
)

FACTOR = MismatchFactor(
    id="attention.rope_fusion",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the rope implementation (fused or not, its tables, its precision) cause the mismatch?",
    switch=Switch(path="operator.rope.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="shared_backend",
            authority=ReferenceAuthority.SHARED_BACKEND,
            covers_paths=(ExecutionPath.TRAINING_FULL_PREFILL, ExecutionPath.ROLLOUT_FULL_PREFILL),
            prerequisites=Prerequisites(
                required_packages={"transformer-engine": ">=2.20,<3", "flashinfer-python": ">=0.7,<0.8"}, device="cuda"
            ),
            pinned_libraries=(
                LibraryPin(package="transformer-engine", version="2.20.2"),
                LibraryPin(package="flashinfer-python", version="0.7.4"),
            ),
            verified_on="not run on a GPU yet; calls checked against the pinned packages' signatures",
        ),
        ReferenceImplementation(
            name="fp32",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.self_attn.rotary_emb"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.self_attention: apply_rotary_pos_emb"),
    ),
    prerequisites=Prerequisites(required_model_traits=("rope",)),
    # Fused or not is what the factor is about: it is recorded, as an implementation is.
    comparison_rules={"extra.fused": ComparisonRule.RECORD_ONLY, **DEFAULT_RULES},
    required_evidence=("model shape", "position cache"),
    pitfalls=("positions_shifted", "weights_differ"),
    recommendation=(
        "Compare model.rope.* in the readback of the {side} side with the model file first (theta, scaling); "
        "if they agree, put rope in fp32 there: apply_rope_fusion=False on training, an fp32 rotary table on rollout."
    ),
)
