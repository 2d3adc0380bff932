"""C06: a sync that delivers a part of the tensors, which the rollout engine accepts without an error."""

import pytest
import torch

from mismatch_hooks.schema.enums import Diagnosis, PolicyRole
from tests.ablating import ablate_tiny
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING


def test_C06_a_sync_that_delivers_one_layer_is_named_tensor_by_tensor(qwen3_engines: TinyEngines) -> None:
    trainer = qwen3_engines.models[TRAINING]
    before = {name: parameter.detach().clone() for name, parameter in trainer.named_parameters()}
    try:
        with torch.no_grad():
            for name, parameter in trainer.named_parameters():
                if "layers.1." in name:  # the optimizer moved layer 1, and no sync delivered it
                    parameter.add_(2.0**-4)
        verdict = ablate_tiny(qwen3_engines, ["weights.sync"]).verdicts[0]
    finally:
        with torch.no_grad():
            for name, parameter in trainer.named_parameters():
                parameter.copy_(before[name])
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    named = len([name for name in qwen3_engines.engines[TRAINING].weights_digest().tensors if ".layers.1." in name])
    assert f"{named} of " in verdict.reason and "model.layers.1." in verdict.reason
    assert "model.layers.0." not in verdict.reason
