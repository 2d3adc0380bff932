"""C16: padding columns of the trainer's head inside its log-sum-exp: every ratio is a little low, and none clipped."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mismatch_hooks.integrations.megatron import MegatronBackend
from mismatch_hooks.integrations.megatron.weights import live_tensors
from mismatch_hooks.pipeline.guards import tripped
from mismatch_hooks.pipeline.guards.captured import differences
from mismatch_hooks.schema.enums import PolicyRole
from mismatch_hooks.schema.readback import Unobservable
from tests.ablating import figures, guard_input
from tests.integrations.megatron.tiny_gpt import build_model, load
from tests.planted_faults import native_is_reference, training_logprobs_at
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING
whole_width = training_logprobs_at(1.0)  # log-softmax over every column that the head has


def padded(tiny: TinyEngines, width: int, own: Any) -> TinyEngines:
    """The same weights in a trainer whose head has rows of zeros up to ``width``."""
    sources = live_tensors(tiny.models[TRAINING])
    tensors = {name: source() for name, source in sources.items() if not isinstance(source, Unobservable)}
    model = build_model(tiny.shape, padded_vocab=width)
    load(model, tensors, tiny.shape)
    trainer = MegatronBackend(model, shape=tiny.shape, token_logprobs=own)
    return replace(tiny, engines={**tiny.engines, TRAINING: trainer}, models={**tiny.models, TRAINING: model})


@pytest.mark.parametrize("width", [pytest.param(640, id="as in the case"), pytest.param(1024, id="twice as wide")])
def test_C16_both_widths_and_the_columns_to_mask_are_named(width: int, llama_engines: TinyEngines) -> None:
    engines = padded(llama_engines, width, whole_width)
    with native_is_reference(engines):  # nothing differs but the width
        found = guard_input(engines)
    (sentence,) = tripped(found)
    assert sentence == (
        f"Training normalises over {width} logits and rollout over 512: {width - 512} padded columns are inside the "
        "log-sum-exp, and all differences have one sign; mask them."
    )
    assert max(differences(found)) < 0.0
    if width == 640:
        assert figures(found)["clip_fraction"] == 0.0


def test_C16_with_equal_logits_the_difference_is_that_of_the_two_widths(llama_engines: TinyEngines) -> None:
    engines = padded(llama_engines, 640, whole_width)
    head = engines.models[TRAINING].output_layer.weight
    with torch.no_grad():
        head.zero_()
        scores = whole_width(engines.models[TRAINING], torch.arange(8)[None])
    difference = scores.double() - math.log(1 / 512)
    # 512 and 640 equal logits; the fp32 log-sum-exp rounds near 6.5, where values are 2^-21 apart.
    assert float((difference - math.log(512 / 640)).abs().max()) <= 2.0**-21


def test_C16_control_padded_and_masked_is_quiet(llama_engines: TinyEngines) -> None:
    engines = padded(llama_engines, 640, None)
    found = guard_input(engines)
    assert tripped(found) == ()
    assert found.training.effective("model.vocab.padded_size") == 640
