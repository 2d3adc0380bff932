"""What was compared: two results compare only when they are about the same tokens in the same places."""

from dataclasses import dataclass

from mismatch_hooks.schema.freeze import SchemaError, freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonIdentity:
    """Everything that makes two scores be about the same thing; all per-sequence fields have one entry a sequence.

    Attributes:
        prompt_ids: token ids.
        response_ids: token ids.
        active_mask: True on tokens that count; as long as the response.
        position_ids: of the response tokens; as long as the response.
        checkpoint: id of the weights' file or name.
        revision: which of its versions; a digest where there is no name.
        model_shape: fingerprint of the shape.
        rollout_group: index of the group of rollouts that each sequence belongs to.
        group_size: rollouts in a group; 0 where groups are not known.
        batch_placement: (batch, row) of each sequence in the scoring pass.
        sampled_in: True on sequences that dynamic sampling kept.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    active_mask: tuple[tuple[bool, ...], ...]
    position_ids: tuple[tuple[int, ...], ...]
    checkpoint: str
    revision: str
    model_shape: str
    rollout_group: tuple[int, ...]
    group_size: int
    batch_placement: tuple[tuple[int, int], ...]
    sampled_in: tuple[bool, ...]

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "response_ids", "active_mask", "position_ids", "rollout_group", "batch_placement"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        object.__setattr__(self, "sampled_in", tuple(self.sampled_in))
        sequences = len(self.response_ids)
        for name in ("prompt_ids", "active_mask", "position_ids", "rollout_group", "batch_placement", "sampled_in"):
            if len(getattr(self, name)) != sequences:
                raise SchemaError(
                    f"ComparisonIdentity: {name} has {len(getattr(self, name))} entries for {sequences} sequences."
                )
        for index, response in enumerate(self.response_ids):
            for name in ("active_mask", "position_ids"):
                found = len(getattr(self, name)[index])
                if found != len(response):
                    raise SchemaError(
                        f"ComparisonIdentity: {name} of sequence {index} has {found} entries for {len(response)} "
                        "response tokens; one belongs to each."
                    )
        groups = [self.rollout_group.count(group) for group in dict.fromkeys(self.rollout_group)]
        if self.group_size and any(count != self.group_size for count in groups):
            raise SchemaError(
                f"ComparisonIdentity: group_size is {self.group_size} and the groups have {groups} rollouts."
            )
