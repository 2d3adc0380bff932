"""Does the precision of the trainer's softmax make rollout and training disagree?"""

from mismatch_hooks.schema.enums import Expansion, FactorCategory, PolicyRole, SettingChannel
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, Switch

FACTOR = MismatchFactor(
    id="attention.softmax_precision",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does it matter whether the trainer's attention takes its softmax in fp32 or in the model's dtype?",
    expansion=Expansion.VALUE_SWEEP,
    switch=Switch(
        path="training.softmax_in_fp32",
        allowed=("native", "fp32", "model_dtype"),
        roles=(PolicyRole.TRAINING,),
        channel=SettingChannel.CONFIG_FIELD,
    ),
    call_sites=(CallSite(role=PolicyRole.TRAINING, name="DotProductAttention.scale_mask_softmax: softmax_in_fp32"),),
    recommendation=(
        "Set attention_softmax_in_fp32=True on training: rollout engines take their softmax in fp32. On a CPU the flag "
        "changes no bit, because torch's softmax computes bf16 in fp32 there."
    ),
)
