"""Does every token stand at its own position on both sides?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Prerequisites, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="input.positions",
    category=FactorCategory.INPUT_IDENTITY,
    question="Do both sides turn each token by the phases of its own position (left padding, packing, off by one)?",
    switch=Switch(path="input.positions", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="rebuilt",
            authority=ReferenceAuthority.SELF_WRITTEN,
            # A decoding step has one token a sequence, and the distance of one token to itself is always right.
            covers_paths=(ExecutionPath.TRAINING_FULL_PREFILL, ExecutionPath.ROLLOUT_FULL_PREFILL),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model: positions"),
        CallSite(role=PolicyRole.TRAINING, name="rotary_pos_emb"),
    ),
    prerequisites=Prerequisites(required_model_traits=("rope",)),
    required_evidence=("position cache",),
    pitfalls=("positions_shifted", "weights_differ"),
    recommendation=(
        "Look at how the {side} side numbers its tokens: positions start anew at every packed sequence, padding on the "
        "left counts for nothing, and each token is one behind the next. A shift of all by one number is no fault."
    ),
)
