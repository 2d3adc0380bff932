"""Does the embedding lookup make rollout and training disagree?"""

from mismatch_hooks.schema.enums import ExecutionPath, FactorCategory, PolicyRole, ReferenceAuthority
from mismatch_hooks.schema.factor import CallSite, MismatchFactor, ReferenceImplementation, Switch

FACTOR = MismatchFactor(
    id="embedding.lookup",
    category=FactorCategory.KERNEL_IMPLEMENTATION,
    question="Does the embedding lookup (its scaling, its cast, its vocabulary shards) cause the mismatch?",
    switch=Switch(path="operator.embedding.implementation", allowed=("native", "reference")),
    references=(
        ReferenceImplementation(
            name="table",
            authority=ReferenceAuthority.SELF_WRITTEN,
            covers_paths=tuple(ExecutionPath),
            verified_on="CPU",
        ),
    ),
    call_sites=(
        CallSite(role=PolicyRole.ROLLOUT, name="model.embed_tokens"),
        CallSite(role=PolicyRole.TRAINING, name="embedding.word_embeddings"),
    ),
    required_evidence=("vocab shard map",),
    pitfalls=("weights_differ",),
    recommendation=(
        "A lookup changes no bit of the table, so look for what the {side} side does to the row afterwards: a scale "
        "(the model file has none), a cast, or a vocabulary shard that starts at the wrong row."
    ),
)
