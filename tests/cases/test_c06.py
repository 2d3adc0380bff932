"""C06: a sync that delivers a part of the tensors, which the rollout engine accepts without an error."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron.weights import live_tensors
from mismatch_hooks.live.weights import WeightsWatch
from mismatch_hooks.schema.enums import Diagnosis, PolicyRole
from mismatch_hooks.schema.readback import Unobservable
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING


def exported(tiny: TinyEngines) -> dict[str, torch.Tensor]:
    sources = live_tensors(tiny.models[TRAINING])
    return {name: source().clone() for name, source in sources.items() if not isinstance(source, Unobservable)}


def deliver(tiny: TinyEngines, tensors: Mapping[str, torch.Tensor]) -> None:
    backend: Any = tiny.engines[ROLLOUT]
    backend._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
    backend._llm.reset_prefix_cache()


@contextmanager
def trained(tiny: TinyEngines) -> Iterator[dict[str, torch.Tensor]]:
    """An optimizer step moved every tensor of the trainer; gives what a sync should deliver, and puts all back."""
    before = exported(tiny)
    held = [(parameter, parameter.detach().clone()) for parameter in tiny.models[TRAINING].parameters()]
    try:
        with torch.no_grad():
            for parameter, _ in held:
                parameter.add_(2.0**-4)
        yield exported(tiny)
    finally:
        with torch.no_grad():
            for parameter, kept in held:
                parameter.copy_(kept)
        deliver(tiny, before)


def judged(tiny: TinyEngines, watch: WeightsWatch | None = None) -> Verdict:
    since = None if watch is None else watch.differing_since
    (verdict,) = ablate_tiny(tiny, ["weights.sync"], differing_since=since).verdicts
    return verdict


def test_C06_a_sync_of_layer_0_alone_names_the_twelve_tensors_it_left_out_and_since_when(
    llama_engines: TinyEngines,
) -> None:
    watch = WeightsWatch(llama_engines.engines, layers=2)
    with trained(llama_engines) as tensors:
        deliver(llama_engines, {name: tensor for name, tensor in tensors.items() if ".layers.0." in name})
        watch.check_all(7)
        watch.check_all(9)
        verdict = judged(llama_engines, watch)
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    assert "12 of 21 tensors were not updated" in verdict.reason and "since step 7 at the latest" in verdict.reason
    assert "model.layers.1." in verdict.reason and "model.layers.0." not in verdict.reason


def test_C06_control_a_whole_sync_is_quiet(llama_engines: TinyEngines) -> None:
    with trained(llama_engines) as tensors:
        deliver(llama_engines, tensors)
        assert judged(llama_engines).diagnosis is Diagnosis.NOT_THIS_FACTOR


def test_C06_a_trainer_that_moved_one_layer_without_a_sync_is_named_tensor_by_tensor(
    qwen3_engines: TinyEngines,
) -> None:
    layer = qwen3_engines.models[TRAINING].decoder.layers[1]
    held = [(parameter, parameter.detach().clone()) for parameter in layer.parameters()]
    try:
        with torch.no_grad():
            for parameter, _ in held:
                parameter.add_(2.0**-4)
        verdict = judged(qwen3_engines)
    finally:
        with torch.no_grad():
            for parameter, kept in held:
                parameter.copy_(kept)
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    named = len([name for name in qwen3_engines.engines[TRAINING].weights_digest().tensors if ".layers.1." in name])
    assert f"{named} of " in verdict.reason and "model.layers.1." in verdict.reason
    assert "model.layers.0." not in verdict.reason
