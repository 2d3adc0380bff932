"""What ``attention.kernel`` declares."""

from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_hooks.operator_checks.attention import adapter, kernel_sites
from mismatch_hooks.operator_checks.attention.factors import rope_fusion
from mismatch_hooks.operator_checks.attention.factors.kernel import FACTOR
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost


def test_the_factor_declares_one_live_switch_and_one_site_a_side() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))
    assert FACTOR.switch.path != rope_fusion.FACTOR.switch.path
    assert {site.role: site.name for site in FACTOR.call_sites} == {
        PolicyRole.ROLLOUT: kernel_sites._ROLLOUT_SITE,
        PolicyRole.TRAINING: kernel_sites._TRAINING_SITE,
    }
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []
    assert "{side}" in FACTOR.recommendation


def test_one_reference_covers_every_path_and_says_where_it_was_run() -> None:
    (reference,) = FACTOR.references
    assert reference.covers_paths == tuple(ExecutionPath)
    assert reference.verified_on == "CPU; not run on a GPU yet"


@pytest.mark.parametrize(("head_dim", "scale"), [(64, 0.125), (16, 0.25)])
def test_the_scale_is_that_of_the_model_files_head_dim(head_dim: int, scale: float) -> None:
    shape: Any = SimpleNamespace(head_dim=head_dim)
    assert adapter.parameters(FACTOR.id, shape) == {"scale": scale}
