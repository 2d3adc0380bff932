"""Does the log-sum-exp over vocabulary shards make rollout and training disagree?"""

from mismatch_hooks.schema.enums import FactorCategory
from mismatch_hooks.schema.factor import MismatchFactor, Prerequisites, Switch

FACTOR = MismatchFactor(
    id="logprob.vocab_parallel_lse",
    category=FactorCategory.SHARDING_AND_REDUCTION,
    question="Does the order of the log-sum-exp over vocabulary shards cause the mismatch?",
    switch=Switch(path="operator.logprob.normaliser", allowed=("native", "reference")),
    prerequisites=Prerequisites(
        blocked_by=("the rollout engine normalises gathered rows in its sampler, where no adapter reaches yet",)
    ),
    required_evidence=("vocab shard map", "log-sum-exp export"),
)
