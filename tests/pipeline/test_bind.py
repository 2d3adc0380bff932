"""Replacing parts of a live engine: in effect inside only, counted, and put back whatever happens."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mismatch_hooks.pipeline.bind import (
    CallCounter,
    PatchSite,
    RestoreError,
    Site,
    StateSite,
    held_environment,
    patched,
    read_switches,
)
from mismatch_hooks.schema.enums import Choice, SwitchStatus
from mismatch_hooks.schema.score import CallCount
from tests.pipeline.samples import NATIVE, REFERENCE, ROPE


class _Engine:
    """Stands for a live module that stores its forward, as vLLM's custom operators do."""

    def __init__(self) -> None:
        self.forward = self.native

    def native(self, number: int) -> str:
        return f"native {number}"


class _Base:
    def method(self, number: int) -> str:
        return f"{type(self).__name__} native {number}"


class _Child(_Base):
    pass


def _reference(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda number: f"reference {number}"


def _site(owner: Any, name: str = "forward", **changes: Any) -> PatchSite:
    fields = {"factor": ROPE.id, "site": "rotary_emb", "build": _reference, "calls_per_forward": 1, **changes}
    return PatchSite(owner=owner, name=name, **fields)


# ---- the six of every context manager -----------------------------------------------------------------------------


def test_a_replacement_is_in_effect_inside_the_block_only() -> None:
    engine = _Engine()
    before = vars(engine)["forward"]
    with patched([_site(engine)], CallCounter()):
        assert engine.forward(1) == "reference 1"
    assert engine.forward(2) == "native 2"
    assert vars(engine)["forward"] is before


def test_a_replacement_is_undone_after_an_exception() -> None:
    engine = _Engine()
    with pytest.raises(KeyboardInterrupt), patched([_site(engine)], CallCounter()):
        raise KeyboardInterrupt
    assert engine.forward(1) == "native 1"


def test_replacements_nest_on_one_site() -> None:
    engine = _Engine()
    outer = _site(engine, build=lambda original: lambda number: f"outer({original(number)})")
    inner = _site(engine, build=lambda original: lambda number: f"inner({original(number)})")
    with patched([outer], CallCounter()):
        with patched([inner], CallCounter()):
            assert engine.forward(1) == "inner(outer(native 1))"
        assert engine.forward(2) == "outer(native 2)"
    assert engine.forward(3) == "native 3"


def test_a_second_site_that_fails_undoes_the_first() -> None:
    engine = _Engine()

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        raise ValueError("this form of rope is not covered")

    with (
        pytest.raises(ValueError, match="not covered"),
        patched([_site(engine), _site(engine, build=refuse)], CallCounter()),
    ):
        pytest.fail("the block must not be entered")
    assert engine.forward(1) == "native 1"
    with pytest.raises(AttributeError), patched([_site(engine), _site(engine, name="gone")], CallCounter()):
        pytest.fail("the block must not be entered")
    assert engine.forward(2) == "native 2"


def test_an_inherited_method_stays_inherited() -> None:
    replaced = _site(_Child, "method", build=lambda original: lambda self, number: f"{type(self).__name__} {number}")
    with patched([replaced], CallCounter()):
        assert (_Child().method(1), _Base().method(1)) == ("_Child 1", "_Base native 1")
    assert "method" not in vars(_Child)
    assert _Child().method(2) == "_Child native 2"


def test_a_foreign_patch_is_reported_and_not_overwritten() -> None:
    engine, other = _Engine(), _Engine()

    def foreign(number: int) -> str:
        return f"foreign {number}"

    with (
        pytest.raises(RestoreError, match=r"^_Engine\.forward holds <function .*foreign.*>, not ours; unload the tool"),
        patched([_site(engine), _site(other)], CallCounter()),
    ):
        engine.forward = foreign
    assert engine.forward(1) == "foreign 1"
    assert other.forward(1) == "native 1"


# ---- what stands in an attribute ----------------------------------------------------------------------------------


def test_a_replaced_method_of_a_class_still_gets_its_instance() -> None:
    build = _site(_Base, "method", build=lambda original: lambda self, number: f"ours, {original(self, number)}")
    nested = _site(_Base, "method", build=lambda original: lambda self, number: f"twice {original(self, number)}")
    with patched([build, nested], CallCounter()):
        assert _Child().method(1) == "twice ours, _Child native 1"
        assert _Base.method(_Base(), 2) == "twice ours, _Base native 2"
    assert _Base().method(3) == "_Base native 3"


def test_what_a_foreign_wrapper_still_holds_calls_the_original_afterwards() -> None:
    engine, counter = _Engine(), CallCounter()
    site = _site(engine)
    with patched([site], counter):
        held = engine.forward
        assert held(1) == "reference 1"
    assert held(2) == "native 2"
    assert [count.observed for count in counter.counts([site], forwards=1, rank=0)] == [1]


def test_an_original_that_somebody_put_back_is_no_foreign_patch() -> None:
    engine = _Engine()
    original = vars(engine)["forward"]
    with patched([_site(engine)], CallCounter()):
        engine.forward = original
    assert vars(engine)["forward"] is original


# ---- counts -------------------------------------------------------------------------------------------------------


def test_calls_are_counted_while_the_block_is_active_and_since_the_last_reset() -> None:
    engine, counter = _Engine(), CallCounter()
    site = _site(engine, calls_per_forward=3)
    engine.forward(0)
    with patched([site], counter):
        for number in range(5):
            engine.forward(number)
        counter.reset()
        engine.forward(5)
        engine.forward(6)
    engine.forward(7)
    assert counter.counts([site], forwards=2, rank=1) == (
        CallCount(factor=ROPE.id, site="rotary_emb", rank=1, expected=6, observed=2),
    )


def test_several_objects_of_one_call_site_add_up() -> None:
    first, second, counter = _Engine(), _Engine(), CallCounter()
    sites = [_site(first, calls_per_forward=2), _site(second, calls_per_forward=1), _site(first, site="other")]
    with patched(sites[:2], counter):
        first.forward(0)
        second.forward(0)
        second.forward(0)
    assert [(one.site, one.expected, one.observed) for one in counter.counts(sites, forwards=2, rank=0)] == [
        ("other", 2, 0),
        ("rotary_emb", 6, 3),
    ]


class _Processor(torch.nn.Module):
    """Calls its head once a call, or goes past what stands in its place."""

    skips = False

    def head(self, number: int) -> str:
        return f"native {number}"

    def forward(self, number: int) -> str:
        return _Processor.head(self, number) if self.skips else self.head(number)


def test_where_calls_vary_their_caller_says_how_many_were_due_and_a_forward_makes_one_at_least() -> None:
    processor, counter = _Processor(), CallCounter()
    site = _site(processor, name="head", caller=processor)

    def counts(forwards: int) -> tuple[int, int]:
        (one,) = counter.counts([site], forwards=forwards, rank=0)
        return one.expected, one.observed

    with patched([site], counter):
        assert [processor(number) for number in range(3)] == ["reference 0", "reference 1", "reference 2"]
        assert (counts(2), counts(4)) == ((3, 3), (4, 3))
        processor.skips = True
        assert processor(3) == "native 3"
        assert counts(2) == (4, 3)
        counter.reset()
        assert counts(0) == (0, 0)
    assert not processor._forward_pre_hooks


# ---- readback -----------------------------------------------------------------------------------------------------


def _status(requested: Any, sites: Sequence[Site]) -> tuple[Any, SwitchStatus, tuple[str, ...]]:
    (state,) = read_switches({ROPE.id: requested}, {ROPE.id: sites}, rank=3)
    assert (state.factor, state.rank, state.requested) == (ROPE.id, 3, requested)
    return state.effective, state.status, state.trace


def test_a_switch_reads_what_the_live_objects_hold() -> None:
    engine = _Engine()
    sites = [_site(engine)]
    assert _status(NATIVE, sites) == (NATIVE, SwitchStatus.APPLIED, ())
    with patched(sites, CallCounter()):
        assert _status(REFERENCE, sites) == (REFERENCE, SwitchStatus.APPLIED, ())
    assert _status(NATIVE, sites) == (NATIVE, SwitchStatus.APPLIED, ())


def test_a_switch_that_was_never_bound_fell_back() -> None:
    assert _status(REFERENCE, [_site(_Engine())]) == (
        NATIVE,
        SwitchStatus.FELL_BACK,
        ("rotary_emb: _Engine.forward holds native",),
    )


def test_a_switch_that_leaked_reads_reference_where_native_was_asked_for() -> None:
    engine = _Engine()
    sites = [_site(engine)]
    with patched(sites, CallCounter()):
        assert _status(NATIVE, sites) == (
            REFERENCE,
            SwitchStatus.FELL_BACK,
            ("rotary_emb: _Engine.forward holds the reference",),
        )


def test_a_partly_bound_switch_has_no_effective_value() -> None:
    bound, loose = _Engine(), _Engine()
    with patched([_site(bound)], CallCounter()):
        assert _status(REFERENCE, [_site(bound), _site(loose)]) == (
            None,
            SwitchStatus.FELL_BACK,
            ("rotary_emb: _Engine.forward holds native",),
        )


def test_a_model_without_call_sites_is_unsupported() -> None:
    assert _status(REFERENCE, []) == (
        None,
        SwitchStatus.UNSUPPORTED,
        ("the live model has no call site of this factor",),
    )


def test_a_silently_reverted_switch_reads_native() -> None:
    engine = _Engine()
    original, sites = vars(engine)["forward"], [_site(engine)]
    with patched(sites, CallCounter()):
        engine.forward = original
        assert _status(REFERENCE, sites)[:2] == (NATIVE, SwitchStatus.FELL_BACK)


def test_another_factor_on_the_same_attribute_is_not_this_factors_reference() -> None:
    engine = _Engine()
    with patched([_site(engine, factor="norm.rmsnorm")], CallCounter()):
        assert _status(REFERENCE, [_site(engine)])[:2] == (NATIVE, SwitchStatus.FELL_BACK)


# ---- a state that is held -----------------------------------------------------------------------------------------


def _flag(held: int = 1, **changes: Any) -> tuple[dict[str, int], StateSite]:
    state = {"flag": 0}
    site = StateSite(
        factor="toy.flag",
        site="flag",
        read=lambda: state["flag"],
        write=lambda value: state.__setitem__("flag", value),
        held=held,
        **changes,
    )
    return state, site


def test_a_state_is_held_inside_the_block_only_and_after_an_exception() -> None:
    state, site = _flag()
    with pytest.raises(KeyError), patched([site], CallCounter()):
        assert state["flag"] == 1
        raise KeyError
    assert state["flag"] == 0


def test_states_nest_and_the_outer_one_comes_back() -> None:
    state, outer = _flag(1)
    inner = replace(outer, held=2)
    with patched([outer, inner], CallCounter()):
        assert state["flag"] == 2
    assert state["flag"] == 0


def test_a_foreign_write_to_a_held_state_is_reported_and_not_overwritten() -> None:
    state, site = _flag()
    with pytest.raises(RestoreError, match=r"^flag reads 7, not the 1 that was bound; it is left so\.$"):
        with patched([site], CallCounter()):
            state["flag"] = 7
    assert state["flag"] == 7


def test_a_state_counts_the_forwards_that_found_it_in_place() -> None:
    state, site = _flag()
    counter = CallCounter()
    with patched([site], counter):
        counter.see_forward([site])
        state["flag"] = 0  # the host's own code sets it back in the middle of a pass
        counter.see_forward([site])
        state["flag"] = 1
    (count,) = counter.counts([site], forwards=2, rank=0)
    assert (count.expected, count.observed) == (2, 1)


def test_a_state_reads_the_value_that_it_holds() -> None:
    state, site = _flag(value="on")
    with patched([site], CallCounter()):
        assert _status("on", [site]) == ("on", SwitchStatus.APPLIED, ())
        state["flag"] = 0
        assert _status("on", [site]) == (None, SwitchStatus.FELL_BACK, ("flag holds another value",))
    assert _status(Choice.NATIVE, [site])[0] is Choice.NATIVE


def test_a_swept_value_is_told_from_another_value_and_from_the_reference() -> None:
    site = _site(_Engine(), value=4)
    with patched([site], CallCounter()):
        assert _status(4, [site])[0] == 4
        assert _status(2, [site])[:2] == (4, SwitchStatus.FELL_BACK)
        assert _status(Choice.REFERENCE, [site])[:2] == (4, SwitchStatus.FELL_BACK)


def test_environment_variables_are_held_for_the_length_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MH_SET", "before")
    monkeypatch.delenv("MH_UNSET", raising=False)
    with pytest.raises(KeyError), held_environment({"MH_SET": "inside", "MH_UNSET": "inside"}):
        assert (os.environ["MH_SET"], os.environ["MH_UNSET"]) == ("inside", "inside")
        raise KeyError
    assert os.environ["MH_SET"] == "before"
    assert "MH_UNSET" not in os.environ
