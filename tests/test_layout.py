"""Rank arithmetic against literal tables and closed formulas, and the text of the errors about sizes."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Coordinate, EngineError, Layout
from engine.errors import LayoutError, UsageError

SIZES = st.integers(1, 6)

# A cube, and two layouts that no swap of axes maps onto themselves. Written down by hand.
TABLES: dict[Layout, dict[str, Any]] = {
    Layout(data=2, pipeline=2, tensor=2): {
        "tensor": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "data": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "pipeline": ((0, 4), (1, 5), (2, 6), (3, 7)),
        # (data, pipeline, tensor) of ranks 0, 1, ...
        "coordinates": [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)],
    },
    Layout(data=1, pipeline=2, tensor=4): {
        "tensor": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "data": ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)),
        "pipeline": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "coordinates": [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3)],
    },
    Layout(data=3, pipeline=1, tensor=2): {
        "tensor": ((0, 1), (2, 3), (4, 5)),
        "data": ((0, 2, 4), (1, 3, 5)),
        "pipeline": ((0,), (1,), (2,), (3,), (4,), (5,)),
        "coordinates": [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1)],
    },
}


@pytest.mark.parametrize("layout", TABLES, ids=str)
def test_ranks_lie_as_in_the_table(layout: Layout) -> None:
    table = TABLES[layout]
    assert layout.world_size == len(table["coordinates"])
    for rank, (data, pipeline, tensor) in enumerate(table["coordinates"]):
        coordinate = Coordinate(data=data, pipeline=pipeline, tensor=tensor)
        assert layout.coordinate(rank) == coordinate
        assert layout.rank(coordinate) == rank


@pytest.mark.parametrize("layout", TABLES, ids=str)
@pytest.mark.parametrize("axis", ["data", "pipeline", "tensor"])
def test_groups_are_those_of_the_table(layout: Layout, axis: Any) -> None:
    groups = TABLES[layout][axis]
    assert layout.groups(axis) == groups
    for group in groups:
        for rank in group:
            assert layout.ranks(axis, rank) == group


def test_the_pipeline_neighbours_of_rank_1_are_5_and_none() -> None:
    line = Layout(data=2, pipeline=2, tensor=2).ranks("pipeline", 1)
    assert line[line.index(1) + 1 :] == (5,)
    assert line[: line.index(1)] == ()


@given(SIZES, SIZES, SIZES)
def test_a_rank_and_its_coordinate_are_one_to_one(data: int, pipeline: int, tensor: int) -> None:
    layout = Layout(data=data, pipeline=pipeline, tensor=tensor)
    seen = []
    for p in range(pipeline):
        for d in range(data):
            for t in range(tensor):
                rank = layout.rank(Coordinate(data=d, pipeline=p, tensor=t))
                assert rank == (p * data + d) * tensor + t
                assert layout.coordinate(rank) == Coordinate(data=d, pipeline=p, tensor=t)
                seen.append(rank)
    assert seen == list(range(data * pipeline * tensor))


@given(SIZES, SIZES, SIZES, st.sampled_from(["data", "pipeline", "tensor"]))
def test_the_groups_of_an_axis_partition_the_world(data: int, pipeline: int, tensor: int, axis: Any) -> None:
    layout = Layout(data=data, pipeline=pipeline, tensor=tensor)
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {getattr(layout, axis)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        places = [layout.coordinate(rank) for rank in group]
        assert [getattr(place, axis) for place in places] == list(range(len(group)))
        assert len({replace(place, **{axis: 0}) for place in places}) == 1, "only this axis differs inside a group"


# ---- sizes that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "started", "text"),
    [
        (
            (2, 2, 3),
            8,
            "data(2) x pipeline(2) x tensor(3) = 12 ranks, but 8 were started: lower tensor to 2 or start 12",
        ),
        ((1, 1, 4), 6, "data(1) x pipeline(1) x tensor(4) = 4 ranks, but 6 were started: raise tensor to 6 or start 4"),
        ((2, 1, 2), 8, "data(2) x pipeline(1) x tensor(2) = 4 ranks, but 8 were started: raise data to 4 or start 4"),
        (
            (2, 2, 2),
            1,
            "data(2) x pipeline(2) x tensor(2) = 8 ranks, but 1 was started: "
            "start 8, or choose sizes whose product is 1",
        ),
        (
            (-1, 1, 4),
            6,
            "pipeline(1) x tensor(4) = 4 ranks hold one replica, which does not divide the 6 that were started: "
            "start a multiple of 4",
        ),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_the_rule_the_numbers_and_the_fix(
    sizes: tuple[int, int, int], started: int, text: str
) -> None:
    data, pipeline, tensor = sizes
    with pytest.raises(LayoutError) as caught:
        Layout(data=data, pipeline=pipeline, tensor=tensor).resolve(started)
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EngineError)


@given(SIZES, SIZES, SIZES, st.integers(1, 60))
def test_every_suggestion_in_the_error_fits(data: int, pipeline: int, tensor: int, started: int) -> None:
    layout = Layout(data=data, pipeline=pipeline, tensor=tensor)
    if data * pipeline * tensor == started:
        assert layout.resolve(started) == layout
        return
    with pytest.raises(LayoutError) as caught:
        layout.resolve(started)
    text = str(caught.value)
    assert f"= {data * pipeline * tensor} ranks, but {started} w" in text
    start = re.search(r"start (\d+)", text)
    assert start is not None
    assert layout.resolve(int(start[1])) == layout
    change = re.search(r"(lower|raise) (\w+) to (\d+)", text)
    could_fit = any(started % ((data * pipeline * tensor) // size) == 0 for size in (data, pipeline, tensor))
    assert (change is not None) == could_fit
    if change is not None:
        verb, axis, size = change[1], change[2], int(change[3])
        assert (verb == "lower") == (size < getattr(layout, axis))
        assert replace(layout, **{axis: size}).resolve(started).world_size == started


@given(SIZES, SIZES, st.integers(1, 72))
def test_data_minus_one_fills_up(pipeline: int, tensor: int, started: int) -> None:
    layout = Layout(data=-1, pipeline=pipeline, tensor=tensor)
    if started % (pipeline * tensor) == 0:
        full = layout.resolve(started)
        assert full == Layout(data=started // (pipeline * tensor), pipeline=pipeline, tensor=tensor)
    else:
        with pytest.raises(LayoutError, match=f"start a multiple of {pipeline * tensor}$"):
            layout.resolve(started)


def test_eight_ranks_with_tensor_2_and_pipeline_2_have_data_2() -> None:
    assert Layout(data=-1, pipeline=2, tensor=2).resolve(8).data == 2


@pytest.mark.parametrize("use", [lambda x: x.world_size, lambda x: x.coordinate(0), lambda x: x.groups("data")])
def test_an_open_data_size_has_no_ranks_yet(use: Any) -> None:
    with pytest.raises(LayoutError, match=r"^data=-1 has no size yet: call layout\.resolve\(world_size\) first$"):
        use(Layout(data=-1))


@pytest.mark.parametrize("axis", ["data", "pipeline", "tensor"])
@pytest.mark.parametrize("size", [0, -2, True, False, 2.0, "2", None])
def test_a_size_that_is_no_positive_integer_is_refused(axis: str, size: Any) -> None:
    with pytest.raises(LayoutError, match=f"^{axis}={re.escape(repr(size))}: the size of "):
        Layout(**{axis: size})


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_only_data_can_be_left_open(axis: str) -> None:
    with pytest.raises(LayoutError, match=f"^{axis}=-1: the size of this axis is at least 1$"):
        Layout(**{axis: -1})


def test_a_rank_or_position_outside_the_world_is_refused() -> None:
    layout = Layout(data=3, pipeline=1, tensor=2)
    for rank in (-1, 6):
        with pytest.raises(LayoutError) as caught:
            layout.coordinate(rank)
        assert str(caught.value) == (f"rank {rank} is outside data(3) x pipeline(1) x tensor(2): ranks go from 0 to 5")
    for wrong, axis, last in ((Coordinate(3, 0, 0), "data", 2), (Coordinate(0, 1, 0), "pipeline", 0)):
        with pytest.raises(LayoutError, match=f"^{axis} .* is outside .*: positions go from 0 to {last}$"):
            layout.rank(wrong)
    with pytest.raises(LayoutError, match=r"^tensor -1 is outside"):
        layout.rank(Coordinate(0, 0, -1))


def test_a_misspelt_axis_is_answered_with_the_nearest() -> None:
    layout = Layout(data=2)
    for call in (lambda: layout.groups("tenser"), lambda: layout.ranks("tenser", 0)):  # type: ignore[arg-type]
        with pytest.raises(UsageError) as caught:
            call()
        assert str(caught.value) == (
            "unknown axis 'tenser' (did you mean 'tensor'?): the axes are data, pipeline, tensor"
        )


def test_layouts_are_values() -> None:
    assert Layout(data=2, tensor=3) == Layout(2, 1, 3)
    assert len({Layout(2, 1, 3), Layout(data=2, tensor=3), Layout(3, 1, 2)}) == 2
    with pytest.raises(FrozenInstanceError):
        Layout().data = 2  # type: ignore[misc]
    assert str(Coordinate(data=1, pipeline=2, tensor=3)) == "data 1, pipeline 2, tensor 3"
