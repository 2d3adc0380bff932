"""Does the gated activation of the MLP make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Prerequisites, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="activation.swiglu",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the gated activation (fused or not, its rounding, which half is the gate) cause the mismatch?",
    switch=Switch(path="operator.activation.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fp32",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.layers.*.mlp.act_fn"),
        CallSite(role=PolicyRole.TRAINING, name="decoder.layers.*.mlp: silu(gate) * up"),
    ),
    prerequisites=Prerequisites(required_model_traits=("gated_mlp",)),
    pitfalls=("weights_differ",),
    recommendation=(
        "Check on the {side} side that the first half of gate_up is the gate and that nothing clamps or offsets it; if "
        "so, make both sides round alike: bias_activation_fusion=False on training and custom_ops=['-silu_and_mul'] on "
        "rollout both round silu(gate) before they multiply."
    ),
)
