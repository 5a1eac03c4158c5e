"""Bucket plans: every element in exactly one place, whole parameters, size limits, equal shards, joined ranges."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.zero.plan import Bucket, ParameterInfo, Range, Slice, plan_buckets

WIDTH = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}  # bytes


def infos(sizes: list[int], dtypes: list[torch.dtype] | None = None) -> list[ParameterInfo]:
    dtypes = dtypes or [torch.float32] * len(sizes)
    return [
        ParameterInfo(f"p{i}", numel, dtype, group=i % 2, counted=((0, numel),) if i % 3 else ())
        for i, (numel, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]


parameters = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 40)), st.sampled_from(sorted(WIDTH, key=str))), max_size=12
).map(lambda pairs: infos([numel for numel, _ in pairs], [dtype for _, dtype in pairs]))
spans = st.sampled_from([(), ((0, 3),), ((0, 1), (2, 4))])
limits = st.one_of(st.integers(1, 400), st.floats(0.5, 400))
shard_counts = st.integers(1, 9)


@given(parameters, limits, shard_counts)
def test_every_element_has_exactly_one_place(own: list[ParameterInfo], limit: float, shards: int) -> None:
    seen: list[int] = []
    for bucket in plan_buckets(own, limit, shards):
        covered = []
        for each in bucket.slices:
            assert each.stop - each.start == own[each.index].numel, "a parameter lies whole in one bucket"
            covered += range(each.start, each.stop)
            seen.append(each.index)
        assert covered == list(range(bucket.used)), "no gap and no overlap"
    assert sorted(seen) == list(range(len(own)))


@given(parameters, limits, shard_counts)
def test_a_bucket_keeps_to_its_limit_unless_one_parameter_fills_it(
    own: list[ParameterInfo], limit: float, shards: int
) -> None:
    for bucket in plan_buckets(own, limit, shards):
        assert bucket.used * WIDTH[bucket.dtype] <= limit or len(bucket.slices) == 1


@given(parameters, limits, shard_counts)
def test_buckets_are_not_smaller_than_they_need_be(own: list[ParameterInfo], limit: float, shards: int) -> None:
    for dtype in WIDTH:
        of_dtype = [bucket for bucket in plan_buckets(own, limit, shards) if bucket.dtype == dtype]
        for bucket, following in itertools.pairwise(of_dtype):
            first = following.slices[0]
            assert (bucket.used + first.stop - first.start) * WIDTH[dtype] > limit


@given(parameters, limits, shard_counts)
def test_dtypes_are_kept_apart_and_parameters_in_order(own: list[ParameterInfo], limit: float, shards: int) -> None:
    plan = plan_buckets(own, limit, shards)
    for bucket in plan:
        assert {own[each.index].dtype for each in bucket.slices} == {bucket.dtype}
    for dtype in WIDTH:
        order = [each.index for bucket in plan if bucket.dtype == dtype for each in bucket.slices]
        assert order == [i for i, info in enumerate(own) if info.dtype == dtype]


@given(parameters, limits, shard_counts)
def test_shards_are_equal_and_padding_is_less_than_one_element_for_each(
    own: list[ParameterInfo], limit: float, shards: int
) -> None:
    for bucket in plan_buckets(own, limit, shards):
        assert bucket.shards == shards
        assert bucket.numel % shards == 0
        assert 0 <= bucket.numel - bucket.used < shards
        bounds = [bucket.bounds(rank) for rank in range(shards)]
        assert [stop - start for start, stop in bounds] == [bucket.numel // shards] * shards
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == bucket.numel


@given(parameters, limits, shard_counts, st.integers(1, 4))
@example(infos([8, 0, 24]), 1e9, 2, 2)
def test_ranges_cover_every_used_element_once_and_join_neighbours(
    own: list[ParameterInfo], limit: float, shards: int, keys: int
) -> None:
    def key(index: int) -> int:
        return (index * index) % keys

    for bucket in plan_buckets(own, limit, shards):
        owner = [each.index for each in bucket.slices for _ in range(each.start, each.stop)]
        for start, stop in [(0, bucket.used), *(bucket.bounds(rank) for rank in range(shards))]:
            ranges = bucket.ranges(start, stop, key)
            expected = [(element, key(owner[element])) for element in range(start, min(stop, bucket.used))]
            assert [(element, run.key) for run in ranges for element in range(run.start, run.stop)] == expected
            assert all(run.start < run.stop for run in ranges)
            for left, right in itertools.pairwise(ranges):
                assert left.stop == right.start
                assert left.key != right.key


def test_this_plan_is_this_one() -> None:
    own = infos([3, 5, 2, 7], [torch.float32, torch.float32, torch.bfloat16, torch.float32])
    plan = plan_buckets(own, 32, 4)
    assert [bucket for bucket in plan if bucket.dtype == torch.float32] == [
        Bucket(torch.float32, (Slice(0, 0, 3), Slice(1, 3, 8)), shard=2, shards=4),
        Bucket(torch.float32, (Slice(3, 0, 7),), shard=2, shards=4),
    ]
    assert [bucket for bucket in plan if bucket.dtype != torch.float32] == [
        Bucket(torch.bfloat16, (Slice(2, 0, 2),), shard=1, shards=4)
    ]
    bucket = Bucket(torch.float32, (Slice(0, 0, 3), Slice(1, 3, 8)), shard=2, shards=4)
    assert bucket.ranges(2, 4, key=lambda index: index) == (Range(2, 3, 0), Range(3, 4, 1))
    assert bucket.ranges(2, 4, key=lambda _: "same") == (Range(2, 4, "same"),)


def test_fewer_elements_than_ranks_leaves_empty_shards() -> None:
    """A 3-element parameter on 4 ranks."""
    (bucket,) = plan_buckets(infos([3]), 100, 4)
    assert (bucket.used, bucket.numel, bucket.shard) == (3, 4, 1)
    held = [bucket.ranges(*bucket.bounds(rank), key=lambda _: 0) for rank in range(4)]
    assert held == [(Range(0, 1, 0),), (Range(1, 2, 0),), (Range(2, 3, 0),), ()]


def test_zero_size_parameters_have_a_place_and_no_elements() -> None:
    """Parameters of 8, 0 and 24 elements on 2 ranks."""
    (bucket,) = plan_buckets(infos([8, 0, 24]), 1000, 2)
    assert bucket.slices == (Slice(0, 0, 8), Slice(1, 8, 8), Slice(2, 8, 32))
    assert [bucket.bounds(rank) for rank in range(2)] == [(0, 16), (16, 32)]
    (empty,) = plan_buckets(infos([0, 0]), 1000, 2)
    assert (empty.used, empty.numel, empty.shard) == (0, 0, 0)
    assert empty.ranges(*empty.bounds(1), key=lambda _: 0) == ()
    assert plan_buckets([], 1000, 2) == ()


def test_counted_runs_are_clipped_to_the_shard_and_neighbours_joined() -> None:
    """p0 counts its elements 0 to 2 and 4, p1 none, p2 all three; a shard may start and stop anywhere."""
    own = [
        ParameterInfo("p0", 5, torch.float32, 0, counted=((0, 2), (4, 5))),
        ParameterInfo("p1", 2, torch.float32, 0, counted=()),
        ParameterInfo("p2", 3, torch.float32, 0, counted=((0, 3),)),
        ParameterInfo("p3", 2, torch.float32, 0, counted=((0, 2),)),
    ]
    (bucket,) = plan_buckets(own, 1000, 1)
    assert bucket.counted(0, 12, own) == ((0, 2), (4, 5), (7, 12))
    assert bucket.counted(1, 8, own) == ((1, 2), (4, 5), (7, 8))
    assert bucket.counted(5, 7, own) == ()


def test_a_limit_below_every_parameter_gives_each_its_own_bucket() -> None:
    assert [len(bucket.slices) for bucket in plan_buckets(infos([4, 1, 9]), 0.5, 2)] == [1, 1, 1]


@given(parameters, limits, shard_counts, st.data())
def test_names_groups_and_counting_do_not_move_elements(
    own: list[ParameterInfo], limit: float, shards: int, data: Any
) -> None:
    """Ranks whose groups or names differ still reduce the same memory in the same order."""
    other = [
        dataclasses.replace(info, name=name, group=data.draw(st.integers(0, 5)), counted=data.draw(spans))
        for name, info in zip("abcdefghijkl", own, strict=False)
    ]
    assert plan_buckets(other, limit, shards) == plan_buckets(own, limit, shards)


def long_plan() -> str:
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    own = [ParameterInfo(f"layer.{i}", 5 * i % 7, kinds[i * i % 3], i % 2, counted=()) for i in range(20)]
    return repr(plan_buckets(own, 60, 3))


def test_the_plan_does_not_depend_on_the_process() -> None:
    script = "from tests.test_bucket_plan import long_plan; print(long_plan())"
    other = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == long_plan()
    assert long_plan().count("Bucket(") > 3
