"""Where between logits and log-prob are fp32 values written back to the model's dtype?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="logprob.precision_downcast",
    category=FactorCategory.OUTPUT_NUMERICS,
    question="Does storing logits, their log-sum-exp or log-probs in the model's dtype on the way cause the mismatch?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="scoring.write_back",
        allowed=("native", "fp32", "logits", "logsumexp", "logprob"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.SCORING_PASS,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="scoring.write_back"),),
    recommendation=(
        "Compute the log-softmax in fp32 and keep it there until the loss; compare the native arm with training=fp32, "
        "which rounds nowhere: where the two are equal, the trainer's function rounds nowhere either."
    ),
)
