"""Does the scale make rollout and training disagree?"""

from mismatch_hooks.schema.enums import FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="toy.scale",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the scale make rollout and training disagree?",
    switch=Switch(path="operator.scale.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="exact", authority=ReferenceAuthority.SELF_WRITTEN, covers_paths=(), verified_on="CPU"
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="scale"),
        CallSite(role=PolicyRole.TRAINING, name="scale"),
    ),
)
