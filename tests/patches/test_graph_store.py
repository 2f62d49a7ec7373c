"""The captured passes of a process against a simple model: which are kept, when memory is given back, how much."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rerun_recorder import RerunRecorder
from sglang_fastpath.patches.diffusion.call_signature import Ineligible, flatten
from sglang_fastpath.patches.diffusion.graph_store import CapturedPass, GraphStore, TooLarge
from stock_chains import assert_same_bytes

UNBOUNDED = 1 << 60


class PoolRecorder(RerunRecorder):
    """Each recording needs `needs` bytes; the pool holds the most that any has needed, as intermediates share it."""

    needs = 0

    def record(self, work: Callable[[], Any]) -> Any:
        recorded = super().record(work)
        self.held = max(self.held, self.needs)
        return recorded


def capture(store: GraphStore, key: Any, factor: float = 1.0, keep: tuple[Any, ...] = ()) -> CapturedPass:
    call = flatten({"x": torch.ones(3), "factor": factor})
    return store.capture(key, call, lambda arguments: arguments["x"] * arguments["factor"], keep)


def make_store(entries: int = 8, pool_bytes: int = UNBOUNDED) -> tuple[GraphStore, PoolRecorder]:
    recorder = PoolRecorder()
    return GraphStore(recorder, entries=entries, pool_bytes=pool_bytes), recorder


@settings(deadline=None, max_examples=50)
@given(
    entries=st.integers(1, 4),
    needs=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    ceiling=st.integers(4, 9),
    calls=st.lists(st.integers(0, 5) | st.sampled_from(["drop odd", "drop all", "clear"]), max_size=40),
)
def test_any_sequence_of_calls(entries: int, needs: list[int], ceiling: int, calls: list[Any]) -> None:
    """The model: an ordered dictionary of what each capture made the pool grow by, and the pool's size."""
    store, recorder = make_store(entries, ceiling)
    model: OrderedDict[int, int] = OrderedDict()
    pool = 0
    for each in calls:
        if each == "clear":
            store.clear()
            model.clear()
            pool = 0
        elif isinstance(each, str):
            unwanted = [key for key in model if each == "drop all" or key % 2]
            store.drop(lambda key, each=each: each == "drop all" or key % 2)
            for key in unwanted:
                del model[key]
            if unwanted and not model:
                pool = 0
        elif (found := store.get(each)) is not None:
            assert each in model
            model.move_to_end(each)
            assert_same_bytes(found.replay([torch.full((3,), 2.0)]), torch.full((3,), 2.0 * each))
            del found
        else:
            assert each not in model
            if len(model) == entries:
                _, grown = model.popitem(last=False)
                if not model or 4 * grown > pool:
                    model.clear()
                    pool = 0
            recorder.needs = needs[each]
            before, pool = pool, max(pool, needs[each])
            if pool > ceiling:
                with pytest.raises(TooLarge):
                    capture(store, each, each)
                model.clear()
                pool = 0
            else:
                capture(store, each, each)
                model[each] = pool - before
        assert len(store) == len(model) == len(recorder.alive)
        assert recorder.pool_bytes() == pool <= ceiling


def test_the_least_recently_used_goes() -> None:
    store, _ = make_store(entries=3)
    for key in "abc":
        capture(store, key)
    assert store.get("a") is not None
    capture(store, "d")
    assert [store.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert store.captures == 4


def test_one_entry_is_enough_to_replay() -> None:
    store, recorder = make_store(entries=1)
    for factor in (2.0, 3.0):
        captured = capture(store, factor, factor)
        assert_same_bytes(captured.replay([torch.arange(3.0)]), factor * torch.arange(3.0))
        assert len(recorder.alive) == 1
    assert recorder.emptied == 1, "the last one of a pool gives its memory back"


@pytest.mark.parametrize(("large", "retired"), [(50, True), (26, True), (25, False), (1, False)])
def test_memory_is_given_back_if_it_is_worth_it(large: int, retired: bool) -> None:
    """The pool of 100 bytes grew by `large` for the pass that is evicted."""
    store, recorder = make_store(entries=3)
    for key, needed in (("first", large), ("second", 100), ("third", 100)):
        recorder.needs = needed
        capture(store, key)
    recorder.needs = 1
    capture(store, "fourth")
    assert recorder.emptied == retired
    assert recorder.pool_bytes() == (1 if retired else 100)
    assert len(store) == (1 if retired else 3)


def test_the_ceiling_names_the_variable_and_drops_everything() -> None:
    store, recorder = make_store(pool_bytes=1000)
    recorder.needs = 1000
    capture(store, "fits")
    recorder.needs = 1001
    with pytest.raises(TooLarge, match="1,001 bytes, over SGLANG_FASTPATH_GRAPH_BYTES=1000"):
        capture(store, "too large")
    assert (len(store), recorder.alive, recorder.pool_bytes()) == (0, [], 0)
    recorder.needs = 1000
    capture(store, "fits")
    assert len(store) == 1


def test_a_capture_that_fails_changes_nothing_else() -> None:
    store, recorder = make_store(entries=2)
    capture(store, "good", 2.0)

    def fail(arguments: Any) -> Any:
        raise RuntimeError("as a model might")

    with pytest.raises(RuntimeError, match="as a model might"):
        store.capture("bad", flatten({"x": torch.ones(3)}), fail)
    with pytest.raises(Ineligible, match=r"output\['sample'\] is a object"):
        store.capture("worse", flatten({"x": torch.ones(3)}), lambda arguments: {"sample": object()})
    gc.collect()
    assert len(store) == len(recorder.alive) == 1
    assert store.get("bad") is store.get("worse") is None
    found = store.get("good")
    assert found is not None
    assert_same_bytes(found.replay([torch.ones(3)]), torch.full((3,), 2.0))
    assert store.captures == 1


def test_what_is_kept_is_freed_with_the_pass() -> None:
    class Table:
        pass

    store, _ = make_store(entries=1)
    table = Table()
    kept = weakref.ref(table)
    capture(store, "first", keep=(table,))
    del table
    assert kept() is not None
    capture(store, "second")
    assert kept() is None


def test_dropping_nothing_gives_nothing_back() -> None:
    store, recorder = make_store()
    store.drop(lambda key: True)
    assert recorder.emptied == 0
    capture(store, "a")
    store.drop(lambda key: key == "b")
    assert recorder.emptied == 0
    store.drop(lambda key: key == "a")
    assert recorder.emptied == 1


@pytest.mark.parametrize("evicted", [False, True], ids=["dropped with the others", "evicted before"])
@pytest.mark.parametrize("cycle", [False, True], ids=["free", "in a cycle"])
def test_the_pool_is_emptied_without_graphs_and_garbage_collected_for_a_cycle_alone(
    cycle: bool, evicted: bool
) -> None:
    """A pool can only be given back without its graphs, and a traceback or a closure may hold one in a cycle."""
    alive_when_emptied, collected = [], []

    class Watching(PoolRecorder):
        def empty_pool(self) -> None:
            alive_when_emptied.append(len(self.alive))
            super().empty_pool()

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    recorder = Watching()
    recorder.needs = 100
    store = GraphStore(recorder, entries=2, pool_bytes=UNBOUNDED)
    capture(store, "grows the pool")
    captured: Any = capture(store, "a")
    if cycle:
        captured.itself = captured
    del captured
    gc.disable()
    gc.callbacks.append(note)
    try:
        if evicted:
            store.drop(lambda key: key == "a")
        store.clear()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert alive_when_emptied == [0]
    assert bool(collected) == cycle, "collecting takes a third of a second beside all of SGLang's objects"


def test_nested_results_keep_their_structure_and_their_identities() -> None:
    x = torch.arange(3.0)

    def work(arguments: Any) -> Any:
        doubled = arguments["x"] * 2
        return {"pair": (doubled, [doubled, None]), "view": doubled[1:], "same": arguments["x"], "number": 3}

    store, recorder = make_store()
    captured = store.capture("a", flatten({"x": x}), work)
    first = captured.replay([x])
    second = captured.replay([x + 1])
    recorder.spoil()
    for result, base in ((first, x), (second, x + 1)):
        assert list(result) == ["pair", "view", "same", "number"]
        assert result["pair"][0] is result["pair"][1][0]
        assert result["pair"][1][1] is None
        assert result["number"] == 3
        assert_same_bytes(
            (result["pair"][0], result["view"], result["same"]),
            (base * 2, base[1:] * 2, base),
        )


def test_a_pass_changes_neither_its_arguments_nor_while_it_is_captured_anything() -> None:
    x, outside = torch.arange(3.0), torch.zeros(3)

    def work(arguments: Any) -> Any:
        arguments["x"].mul_(2)
        outside.add_(arguments["x"])
        return arguments["x"] + 1

    store, _ = make_store()
    captured = store.capture("a", flatten({"x": x}), work)
    assert_same_bytes((x, outside), (torch.arange(3.0), torch.zeros(3)))
    for count in (1, 2):
        assert_same_bytes(captured.replay([x]), torch.arange(3.0) * 2 + 1)
        assert_same_bytes((x, outside), (torch.arange(3.0), torch.arange(3.0) * 2 * count))
