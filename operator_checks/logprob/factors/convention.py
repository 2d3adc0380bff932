"""Are the trainer's log-probs those of the raw logits, or those of the logits that were sampled from?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

# A switch of the trainer alone: vLLM computes the log-probs of a prompt before any transform of its sampler, so every
# prefill of the rollout engine is raw. That the live values were raw too is what the guards compare.
FACTOR = MismatchFactor(
    id="logprob.convention",
    category=FactorCategory.OUTPUT_NUMERICS,
    question="Are log-probs taken from the raw logits on one side and from the temperature's on the other?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.convention",
        allowed=("native", "raw", "processed"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.SCORING_PASS,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="scoring.convention"),),
    recommendation=(
        "The arm that equals native to the bit is the trainer's convention. Rollout is scored raw: where training=raw "
        "is far lower than native, the trainer divides its logits by a temperature and rollout does not; build the "
        "engine with logprobs_mode='processed_logprobs', or take the division out. Sample without top-p, top-k and "
        "min-p either way: no division restores what they cut off."
    ),
)
