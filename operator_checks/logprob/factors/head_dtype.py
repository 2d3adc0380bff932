"""Does the output head make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="logprob.head_dtype",
    category=FactorCategory.OUTPUT_NUMERICS,
    question="Does the output head (its dtype, the dtype of its logits, how many rows it gets) cause the mismatch?",
    switch=Switch(path="operator.head.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="fp32",
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
        CallSite(role=PolicyRole.ROLLOUT, name="logits_processor: lm_head"),
        CallSite(role=PolicyRole.TRAINING, name="output_layer"),
    ),
    required_evidence=("vocab shard map",),
    pitfalls=("weights_differ", "padded_vocabulary"),
    recommendation=(
        "Run the output head in fp32 on both sides or on neither: the {side} side departs from the fp32 head "
        "(rollout: hf_overrides={{'head_dtype': 'float32'}}; training: cast hidden states and head to fp32)."
    ),
)
