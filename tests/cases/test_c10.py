"""C10: sampling settings that the checkpoint's folder supplied and nobody asked for."""

import pytest

from mismatch_hooks.live.settings import with_sampling
from mismatch_hooks.pipeline.guards import GUARDS, tripped
from mismatch_hooks.schema.enums import Source
from mismatch_hooks.schema.readback import Reading
from tests.ablating import sampled_input
from tests.tiny_engines import CHAT_SAMPLING, TinyEngines

pytestmark = pytest.mark.engine


def test_C10_each_value_is_named_with_the_file_that_it_came_from(chat_engines: TinyEngines) -> None:
    found = sampled_input(chat_engines)
    (sentence,) = GUARDS["unasked_sampling"](found)
    assert sentence in tripped(found)
    assert sentence.startswith("Rollout samples with settings that nobody requested: ")
    for name, value in CHAT_SAMPLING.items():
        assert f"{name}={value} (generation_config.json)" in sentence
    readback = with_sampling(found.rollout, found.sequences).settings
    for name, value in CHAT_SAMPLING.items():
        reading = readback[f"rollout.sampling.{name}"]
        assert isinstance(reading, Reading)
        assert (reading.effective, reading.source, reading.requested) == (value, Source.GENERATION_CONFIG, "nothing")


def test_C10_control_explicit_parameters_are_quiet(chat_engines: TinyEngines) -> None:
    from vllm import SamplingParams

    explicit = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    assert tripped(sampled_input(chat_engines, explicit)) == ()
