"""The collectives benchmark: its formulas and sizes, what it expects and refuses, and small runs, whole and broken."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import engine
from benchmarks import collectives_results as results
from benchmarks.collectives import finish, main, without_nproc
from benchmarks.collectives_case import (
    INEXACT,
    OPS,
    Case,
    Cost,
    Row,
    Way,
    bandwidths,
    checked,
    iterations_for,
    modulus,
    parse_sizes,
    percentile,
    plan,
    select_algorithms,
    thresholds,
    ways,
)
from benchmarks.collectives_operations import OPERATIONS, in_memory, make_buffers
from benchmarks.collectives_options import check, parser
from benchmarks.collectives_plot import _colours, _title
from benchmarks.collectives_ranks import Ranks
from benchmarks.collectives_raw import RAW
from benchmarks.job import cause
from engine import Layout, Mesh
from engine.comm.choice import algorithms_of, read_choice
from engine.errors import UsageError
from tests.world import World

FIELDS = [
    "op", "backend", "transport", "algorithm", "device", "dtype", "n", "bytes", "count", "in_place", "t_min", "t_p50",
    "t_p95", "t_p99", "algbw_gbs", "busbw_gbs", "wrong", "note", "memory",
]  # fmt: skip
ROW = Row("all_reduce", "gloo", "torch", "ring", "cpu", "float32", 4, 4096, 1024, True, 1.0, 2.0, 3.0, 4.0, 1, 1, 0)
SMALL_RUN = ["--nproc", "2", "--iterations", "3", "--warmup", "1"]


# ---- formulas ----------------------------------------------------------------------------------------------------


def test_bandwidths_are_those_of_nccl_tests() -> None:
    found = {op: bandwidths(op, 1_000_000_000, 1.0, 4) for op in OPS}
    assert {algbw for algbw, _ in found.values()} == {1.0}  # GB/s, 1e9 bytes
    assert {op: busbw for op, (_, busbw) in found.items()} == {
        "all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "reduce_scatter": 0.75, "all_gather": 0.75,
        "all_to_all": 0.75, "gather": 0.75, "scatter": 0.75, "send_recv": 1.0, "barrier": 1.0,
    }  # fmt: skip
    assert bandwidths("all_reduce", 1_000_000_000, 0.5, 1) == (2.0, 0.0)
    assert bandwidths("all_gather", 1_000_000_000, 1.0, 1) == (1.0, 0.0)
    assert Case("all_reduce", "bfloat16", 10, True, ()).bytes == 20


def test_percentiles_interpolate() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 95, 100)] == [1.0, 2.5, 3.85, 4.0]
    assert percentile([7.0], 99) == 7.0


def test_exactness_ends_where_sums_of_distinct_integers_leave_the_dtype() -> None:
    assert [modulus("all_reduce", "bfloat16", n) for n in (1, 2, 4, 15, 16, 32)] == [251, 127, 61, 17, None, None]
    assert [modulus("all_reduce", "float16", n) for n in (43, 44)] == [47, None]
    assert [modulus("reduce", "int8", n) for n in (2, 8)] == [61, 13]
    assert modulus("reduce_scatter", "float32", 4) == 65521
    assert modulus("broadcast", "bfloat16", 1000) == 251  # nothing is added
    for dtype in ("float32", "float16", "bfloat16", "int8", "uint8"):
        for n in range(2, 44):
            m = modulus("all_reduce", dtype, n)
            if m is not None:
                highest = torch.tensor(n * (m - 1)).to(getattr(torch, dtype))
                assert int(highest) == n * (m - 1)
                assert m > n


def test_a_result_that_cannot_be_exact_says_so() -> None:
    sums, moves = (Case(op, "bfloat16", 64, True, ()) for op in ("all_reduce", "broadcast"))
    assert checked(sums, 16, True) == (False, INEXACT) == (False, "inexact, not checked")
    assert checked(moves, 16, True) == (True, "")
    assert checked(sums, 4, False) == (False, "not checked")
    assert checked(Case("barrier", "uint8", 0, False, ()), 4, True) == (True, "moves no values")


def test_iterations_follow_the_time_of_one() -> None:
    assert [iterations_for(seconds) for seconds in (0.0, 1e-4, 4e-3, 1.0)] == [200, 200, 50, 8]


def test_thresholds_keep_native_within_the_margin_and_merge_neighbours() -> None:
    times = {
        1024: {"native": 1.0, "ring": 0.96},  # not 5 % faster
        2048: {"native": 1.0, "ring": 1.2},
        4096: {"native": 1.0, "ring": 0.9, "tree": 0.8},
        8192: {"native": 1.0, "ring": 0.7, "tree": 0.6},
        16384: {"native": 1.0, "ring": 0.5, "tree": 0.6},
    }
    assert thresholds(times) == ((2048, "native"), (8192, "tree"), (math.inf, "ring"))
    assert thresholds({1024: {"native": 1.0}}) == ((math.inf, "native"),)


# ---- sizes and cases ---------------------------------------------------------------------------------------------


def test_sizes_are_read() -> None:
    assert parse_sizes("1K:8K") == (1024, 2048, 4096, 8192)
    assert parse_sizes("1K:64K:4") == (1024, 4096, 16384, 65536)
    assert parse_sizes("1M,512,2g") == (512, 1 << 20, 2 << 30)


def test_vectors_are_cut_to_equal_parts_and_never_empty() -> None:
    cases = list(plan(["all_reduce", "all_gather"], [2, 1000], ["float32"], ["native"], 3))
    assert [(each.op, each.count, each.bytes, each.in_place) for each in cases] == [
        ("all_reduce", 1, 4, True),
        ("all_reduce", 250, 1000, True),
        ("all_gather", 3, 12, False),
        ("all_gather", 249, 996, False),
        ("all_gather", 3, 12, True),
        ("all_gather", 249, 996, True),
    ]


def test_all_names_every_algorithm_and_torchs_own_call() -> None:
    assert OPS.keys() == OPERATIONS.keys() == RAW.keys()
    for op in OPS:
        assert select_algorithms(op, ["all"], 4) == ("torch", *algorithms_of(op))
        assert select_algorithms(op, ["all"], 1) == algorithms_of(op)
    assert select_algorithms("all_reduce", ["chosen", "ring"], 4) == ("chosen", "ring")


def test_ways_are_torchs_call_once_and_the_engines_over_each_transport_and_memory() -> None:
    torchs, over = Way("torch", "torch", "private"), [("torch", "private"), ("shm", "private"), ("shm", "registered")]
    assert ways(["torch", "ring"], ["torch", "shm"], ["private", "registered"]) == (
        torchs,
        *(Way(transport, "ring", memory) for transport, memory in over),
    )
    assert ways(["ring"], ["shm"], ["registered"]) == (Way("shm", "ring", "registered"),)
    assert ways(["torch"], ["shm"], ["registered"]) == (torchs,)
    assert [str(way) for way in ways(["torch", "ring"], ["shm"], ["registered"])] == [
        "torch",
        "ring over shm, registered",
    ]


def test_a_barrier_is_one_case_of_no_bytes() -> None:
    (case,) = plan(["barrier"], [2, 1000], ["float32", "int8"], ["all"], 3, ["shm"], ["private", "registered"])
    assert (case.bytes, case.count, case.in_place) == (0, 0, False)
    assert case.ways == (Way("torch", "torch", "private"), Way("shm", "native", "private"))


def buffers_in_memory_of_allocate(mesh: Mesh) -> list[Any]:
    found: list[Any] = []
    with engine.init(mesh.layout, device="cpu", transport="shm") as sharing:
        for op in ("reduce_scatter", "all_gather", "gather", "send_recv"):
            for in_place in OPS[op].in_place:
                case = Case(op, "float32", 3000, in_place, ())
                private = make_buffers(case, 3, mesh.data.rank, mesh.device, True)
                made = in_memory(private, "registered", case, sharing.data)
                same = torch.equal(made.x, private.x) and made.expected is private.expected
                sizes = (len(made.x), len(made.out)) == (len(private.x), len(private.out))
                apart = made.x.data_ptr() != private.x.data_ptr() and made.out.data_ptr() != private.out.data_ptr()
                kept = in_memory(private, "private", case, sharing.data) is private
                found.append((op, in_place, sharing.data.memory()["allocated"], same and sizes and apart and kept))
                del made
    return found


def test_registered_buffers_lie_in_shared_memory_and_hold_the_same(world: World) -> None:
    for found in world.run(Layout(data=3), buffers_in_memory_of_allocate):
        assert found == [
            ("reduce_scatter", False, 16_000, True), ("reduce_scatter", True, 12_000, True),
            ("all_gather", False, 16_000, True), ("all_gather", True, 12_000, True),
            ("gather", False, 16_000, True), ("send_recv", False, 24_000, True),
        ]  # fmt: skip


def test_every_way_has_a_colour_of_its_own() -> None:
    every = sorted({name for op in OPS for name in algorithms_of(op)})
    made = ways(["torch", *every], ["torch", "shm"], ["private", "registered"])
    assert len(set(_colours(made[:22]).values())) == 22
    assert _colours(made).keys() == set(made)
    assert list(_colours(ways(["torch", "ring"], ["torch"], ["private"])).values()) == ["black", "#009E73"]


@pytest.mark.parametrize("op", [op for op, kind in OPS.items() if not kind.empty])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_expected_is_what_plain_torch_makes_of_the_inputs(op: str, dtype: str) -> None:
    n, count = 3, 3 * 700
    for in_place in OPS[op].in_place:
        case = Case(op, dtype, count, in_place, ())
        ranks = [make_buffers(case, n, rank, torch.device("cpu"), True) for rank in range(n)]
        xs = [each.x.double() for each in ranks]
        assert all((a != b).all() for i, a in enumerate(xs) for b in xs[:i])
        total, joined, cut = torch.stack(xs).sum(0), torch.cat(xs), [x.chunk(n) for x in xs]
        for rank, buffers in enumerate(ranks):
            wanted = {
                "all_reduce": total,
                "broadcast": xs[0],
                "reduce": total if rank == 0 else None,
                "reduce_scatter": total.chunk(n)[rank],
                "all_gather": joined,
                "all_to_all": torch.cat([parts[rank] for parts in cut]),
                "gather": joined if rank == 0 else None,
                "scatter": cut[0][rank],
                "send_recv": xs[rank - 1],
            }[op]
            if wanted is None:
                assert buffers.expected is None
                continue
            assert buffers.expected is not None
            assert torch.equal(buffers.expected.double(), wanted)
            buffers.poison()
            assert torch.equal(buffers.x, buffers.source)
            assert buffers.wrong() > 0 or (op, rank) == ("broadcast", 0)  # the root has it from the start
            buffers.out.copy_(wanted)
            assert buffers.wrong() == 0
            buffers.out[5] = 0 if wanted[5] else 1
            assert buffers.wrong() == 1


# ---- files -------------------------------------------------------------------------------------------------------


def test_rows_are_compared_by_minimum_up_to_1_mib_and_by_median_above() -> None:
    small, large = replace(ROW, bytes=1 << 20), replace(ROW, bytes=(1 << 20) + 4)
    assert results.slower([small, large], [replace(small, t_p50=9.0), replace(large, t_min=9.0)], 0.1) == (2, [])
    assert results.slower([small], [replace(small, t_min=1.1)], 0.1) == (1, [])
    assert results.slower([small], [replace(small, t_min=1.2)], 0.1) == (
        1,
        ["all_reduce ring over torch, private: float32 n=4 1048576 B in place: t_min 1000000.0 -> 1200000.0 us, 1.20x"],
    )
    assert results.slower([large], [replace(large, t_p50=3.0)], 0.4)[1][0].endswith(
        "t_p50 2000000.0 -> 3000000.0 us, 1.50x"
    )
    for other in ({"n": 2}, {"transport": "shm"}, {"memory": "registered"}):
        assert results.slower([small], [replace(small, t_min=5.0, **other)], 0.1) == (0, [])


def test_only_named_parts_of_the_environment_are_recorded() -> None:
    given = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "NCCL_SECRET": "x", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/"}
    assert results.environment(given) == {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("rows", "baseline", "code", "text"),
    [
        ([ROW], None, 0, ""),
        ([replace(ROW, wrong=None, note=INEXACT)], None, 0, ""),
        (
            [replace(ROW, wrong=3, transport="shm", memory="registered")],
            None,
            1,
            "error: all_reduce ring over shm, registered: float32 4096 B in place: 3 elements are wrong",
        ),
        ([ROW], [ROW], 0, ""),
        ([replace(ROW, t_min=1.2)], [ROW], 1, "error: slower: all_reduce ring over torch, private: float32 n=4 4096 B"),
        ([ROW], [replace(ROW, n=3)], 1, "error: the baseline has no row of this run"),
    ],
)
def test_the_exit_code_says_what_was_found(
    rows: list[Row], baseline: list[Row] | None, code: int, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = check(parser("").parse_args(["--check", "--sizes", "1K"]), None)
    settings = replace(settings, baseline=None if baseline is None else tuple(baseline))
    assert finish(settings, {}, rows) == code
    assert capfd.readouterr().err.startswith(text)


def test_torchrun_gets_no_option_that_it_takes_for_its_own() -> None:
    assert without_nproc(["--ops", "all", "--nproc", "4", "--check"]) == ["--ops", "all", "--check"]
    assert without_nproc(["--nproc=4", "--sizes", "1K"]) == ["--sizes", "1K"]


def test_the_first_crash_is_named_and_not_what_it_caused() -> None:
    log = "[rank1]: RuntimeError: planted\nerror: rank 0: all_gather failed\n[rank0]: ValueError: later\n"
    assert cause(log) == "rank 1: RuntimeError: planted"
    log = "error: rank 0 (data 0): all_reduce failed after 0.1 s\nerror: rank 1: planted\n"
    assert cause(log) == "rank 1: planted"
    assert cause("error: ranks 1, 2: planted\n") == "ranks 1, 2: planted"


@pytest.mark.parametrize(
    ("transports", "named"), [("torch shm torch", "torch (gloo) and shm"), ("shm", "shm"), ("torch", "torch (gloo)")]
)
def test_the_picture_names_the_transports_that_were_measured(transports: str, named: str) -> None:
    meta = {"hardware": "a chip", "cores": 2, "versions": {"torch": "9.9"}, "date": "2026-11-30"}
    title = _title(meta, [replace(ROW, transport=each) for each in transports.split()])
    assert title == f"Collectives over 4 ranks, float32: {named}, a chip, 2 cores\ntorch 9.9, 2026-11-30"


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("collectives")
    files = {name: folder / f"run.{name}" for name in ("json", "csv", "plot")}
    files["plot"] = folder / "run.png"
    command = [*SMALL_RUN, "--ops", "all", "--sizes", "1K:4K:4", "--check", "--transports", "torch,shm"]
    command += ["--memory", "private,registered", "--dtypes", "float32"]
    written = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    return {"code": main([*command, *written]), **files}


def test_a_run_is_right_everywhere_and_writes_numbers_and_a_picture(whole_run: dict[str, Any]) -> None:
    assert whole_run["code"] == 0
    document = json.loads(whole_run["json"].read_text())
    meta, rows = document["meta"], document["rows"]
    assert {"date", "command", "versions", "hardware", "cores", "environment", "memory_copy_gbs"} <= meta.keys()
    assert meta["command"].startswith("python -m benchmarks.collectives --nproc 2 ")
    assert set(meta["environment"]) <= set(results.ENVIRONMENT)
    assert [list(row) for row in rows] == [FIELDS] * len(rows)
    assert {row["wrong"] for row in rows} == {0}
    media = (("torch", "private"), ("shm", "private"), ("shm", "registered"))
    wanted = {
        (op, *how, "float32", size, in_place)
        for op, kind in OPS.items()
        for how in (
            ("torch", "torch", "private"),
            *((transport, name, memory) for transport, memory in media for name in algorithms_of(op)),
        )
        for size in (1024, 4096)
        for in_place in kind.in_place
        if op != "barrier"
    } | {
        ("barrier", transport, name, "private", "uint8", 0, False)
        for transport, name in (("torch", "torch"), ("torch", "native"), ("shm", "native"))
    }
    names = ("op", "transport", "algorithm", "memory", "dtype", "bytes", "in_place")
    assert {tuple(row[name] for name in names) for row in rows} == wanted
    assert len(rows) == len(wanted)
    assert meta["transports"] == ["torch", "shm"]
    for row in rows:
        assert 0 < row["t_min"] <= row["t_p50"] <= row["t_p95"] <= row["t_p99"] < 60
        assert row["algbw_gbs"] == pytest.approx(row["bytes"] / row["t_min"] / 1e9)
        assert (row["backend"], row["device"], row["n"]) == ("gloo", "cpu", 2)
    with whole_run["csv"].open() as file:
        lines = list(csv.DictReader(file))
    assert [line["t_p50"] for line in lines] == [str(row["t_p50"]) for row in rows]
    assert list(lines[0]) == FIELDS
    assert whole_run["plot"].read_bytes().startswith(b"\x89PNG")
    assert [asdict(row)["op"] for row in results.read(whole_run["json"])] == [row["op"] for row in rows]


def test_a_corrupted_collective_is_found_and_a_slower_run_too(
    whole_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(whole_run["json"].read_text())
    for row in document["rows"]:
        row["t_min"] /= 1000
    faster, out = tmp_path / "faster.json", tmp_path / "run.json"
    faster.write_text(json.dumps(document))
    command = [*SMALL_RUN, "--ops", "all_gather,all_reduce", "--sizes", "1K", "--dtypes", "float32", "--check"]
    planted = ["--algorithms", "native,chosen", "--transports", "torch"]
    planted += ["--operations", "tests.bench_corrupt:one_element"]
    assert main([*command, *planted, "--json", str(out), "--baseline", str(faster)]) == 1
    rows = json.loads(out.read_text())["rows"]
    wrong = {(row["op"], row["in_place"], row["algorithm"]): row["wrong"] for row in rows}
    assert wrong == {
        ("all_gather", False, "native"): 1, ("all_gather", False, "chosen"): 1,
        ("all_gather", True, "native"): 1, ("all_gather", True, "chosen"): 1,
        ("all_reduce", True, "native"): 0, ("all_reduce", True, "chosen"): 0,
    }  # fmt: skip
    assert [row["note"] for row in rows if row["algorithm"] == "chosen"] == ["took pairwise"] * 2 + ["took doubling"]
    shown = capfd.readouterr()
    assert "error: all_gather native over torch, private: float32 1024 B out of place: 1 elements are" in shown.err
    assert "3 of 6 rows are in the baseline; slower by more than 10%: 3" in shown.out
    assert "error: slower: all_reduce native over torch, private: float32 n=2 1024 B in place: t_min" in shown.err


@pytest.mark.parametrize(("environment", "taken"), [("", "shm"), ("torch", "torch")])
def test_the_transport_is_by_default_what_the_engine_takes(
    environment: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TRANSPORT", environment)
    assert check(parser("").parse_args([]), None).transports == (taken,)


def test_results_from_before_there_were_memories_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    old = {name: value for name, value in ROW.to_dict().items() if name != "memory"}
    path.write_text(json.dumps({"meta": {"benchmark": "collectives"}, "rows": [old]}))
    assert results.read(path) == (ROW,)


def test_an_axis_of_a_layout_is_measured_alone(tmp_path: Path) -> None:
    """2 x 2 ranks: groups of 2 at work side by side, whose rows say so."""
    out = tmp_path / "rows.json"
    layout = ["--nproc", "4", "--layout", "data=2,tensor=2", "--axis", "tensor", "--iterations", "3", "--warmup", "1"]
    assert main([*layout, "--ops", "all_reduce,all_gather", "--sizes", "4K", "--check", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert {row["op"] for row in document["rows"]} == {"all_reduce", "all_gather"}
    assert {(row["n"], row["wrong"]) for row in document["rows"]} == {(2, 0)}


def test_what_a_call_costs_is_measured_for_every_variant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    assert main(["--overhead", "--nproc", "2", "--iterations", "33", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    meta, rows = document["meta"], document["rows"]
    assert (meta["benchmark"], meta["n"], meta["blocks"]) == ("collectives_overhead", 2, 30)
    assert [tuple(row[name] for name in ("n", "transport", "call", "took", "watch")) for row in rows] == [
        (2, "torch", "torch", "torch", ""),
        *(
            (2, transport, call, took, watch)
            for transport in ("torch", "shm")
            for watch in ("", "ledger", "checks")
            for call, took in (("native", "native"), ("chosen", "doubling" if transport == "torch" else "native"))
        ),
        (1, "local", "chosen", "local", ""),
        (1, "local", "chosen", "local", "ledger"),
        (1, "local", "chosen", "local", "checks"),
    ]
    torchs = rows[0]
    for row in rows:
        assert list(row) == [each.name for each in fields(Cost)]
        assert (row["op"], row["backend"], row["device"], row["dtype"]) == ("all_reduce", "gloo", "cpu", "float32")
        assert (row["bytes"], row["calls"]) == (4, 33)
        assert 0 < row["t_min"] <= row["t_p50"] < 60
        for name, over in (("t_min", "over_min_us"), ("t_p50", "over_p50_us")):
            wanted = None if row["n"] == 1 else pytest.approx((row[name] - torchs[name]) * 1e6)
            assert row[over] == wanted
    shown = capfd.readouterr().out
    assert "all_reduce of one float32 element" in shown
    assert "chosen (native)" in shown
    with pytest.raises(UsageError, match="it is a result of 'collectives_overhead'"):
        results.read(out)


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.collectives"]
    return subprocess.run(
        [sys.executable, *launch, "--iterations", "3", "--warmup", "1", *options], check=False, text=True,
        capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_under_torchrun_it_is_a_rank_and_tunes(tmp_path: Path) -> None:
    tuning, out = tmp_path / "tuning.json", tmp_path / "run.json"
    done = torchrun("--sizes", "1K,4K", "--overlap", "--json", str(out), "--tune", "--out", str(tuning))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# op ") == 1  # rank 0 alone prints
    rows = json.loads(out.read_text())["rows"]
    assert all(row["t_exposed"] == row["t_together"] - row["t_matmul"] for row in rows)
    assert {row["transport"] for row in rows} == {"torch"}  # whose choice the file is
    table = read_choice(tuning).table
    assert table.keys() == {(op, 2, 1) for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")}
    assert all(found[-1][0] == math.inf for found in table.values())


def test_a_crash_ends_with_its_cause(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the log is kept
    out = tmp_path / "run.json"
    command = [*SMALL_RUN, "--ops", "all_gather", "--sizes", "1K", "--operations", "tests.bench_corrupt:crash"]
    assert main([*command, "--json", str(out)]) == 1
    assert "error: the job failed: rank 1: RuntimeError: the planted crash of rank 1; log: " in capfd.readouterr().err
    assert not out.exists()


def test_a_damaged_baseline_ends_all_ranks_with_one_line_and_nothing_is_timed(tmp_path: Path) -> None:
    damaged = tmp_path / "old.json"
    damaged.write_text("{")
    done = torchrun("--ops", "all_gather", "--sizes", "1K", "--baseline", str(damaged))
    assert done.stderr.count("is no result of this benchmark") == 1
    assert f"error: rank 0: {damaged} is no result of this benchmark: JSONDecodeError" in done.stderr
    assert set(re.findall(r"exitcode +: (-?\d+)", done.stderr)) <= {"2", "-15"}  # or ended by torchrun while it exits
    assert "exitcode  : 2" in done.stderr
    assert done.stdout == ""


def test_what_one_rank_fails_with_is_said_once_with_its_number() -> None:
    options = ["--ops", "all_gather", "--sizes", "1K", "--operations", "tests.bench_corrupt:refuse"]
    done = torchrun(*options)
    assert done.returncode != 0
    assert done.stderr.count("a planted wrong call") == done.stderr.count("error: rank 1: a planted wrong call\n") == 1


@pytest.mark.parametrize(("planted", "text"), [("refuse_to_load", "command"), ("refuse", "call")])
def test_an_error_of_another_rank_than_0_reaches_who_started_them(
    planted: str, text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [*SMALL_RUN, "--ops", "all_gather", "--sizes", "1K", "--operations", f"tests.bench_corrupt:{planted}"]
    assert main(command) == 1
    assert f"error: the job failed: rank 1: a planted wrong {text}; log: " in capfd.readouterr().err


def together(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(Ranks(rank, size, store)), range(size)))


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        (["", "", ""], []),
        (["", "no memory", ""], ["error: rank 1: no memory"]),
        (["", "no memory", "no memory"], ["error: ranks 1, 2: no memory"]),
        (["a", "b", "b"], ["error: rank 0: a", "error: ranks 1, 2: b"]),
        (["a", "a", "a"], ["error: a"]),
    ],
)
def test_a_command_that_is_wrong_on_one_rank_is_refused_on_all(
    errors: list[str], lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert together(3, lambda ranks: ranks.refuse(errors[ranks.rank])) == [bool(lines)] * 3
    assert capfd.readouterr().err.splitlines() == lines
    assert Ranks(0, 1, None).refuse("alone")
    assert capfd.readouterr().err == "error: alone\n"


def test_the_same_words_are_said_by_one_rank(capfd: pytest.CaptureFixture[str]) -> None:
    together(3, lambda ranks: ranks.say("differs"))
    together(2, lambda ranks: ranks.say(f"rank {ranks.rank} (data {ranks.rank}): failed"))
    first, *others = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"error: rank [012]: differs", first)
    assert sorted(others) == ["error: rank 0 (data 0): failed", "error: rank 1 (data 1): failed"]


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "all_reduse"], "--ops: unknown 'all_reduse' (did you mean 'all_reduce'?): choose all_reduce, "),
        (["--ops", ","], "--ops: nothing is named: choose"),
        (["--dtypes", "bflaot16"], "--dtypes: unknown 'bflaot16' (did you mean 'bfloat16'?)"),
        (["--axis", "tensr"], "--axis: unknown 'tensr' (did you mean 'tensor'?)"),
        (["--device", "cdua"], "device='cdua' (did you mean 'cuda'?)"),
        (["--transports", "shmem"], "--transports: unknown 'shmem' (did you mean 'shm'?): choose torch, shm"),
        (["--nproc", "1", "--transports", "torch,shm"], "--transports torch,shm: a group of one rank has none"),
        (["--tune", "--out", "x.json", "--transports", "shm"], "--tune chooses between algorithms over torch; shm has"),
        (["--memory", "shared"], "--memory: unknown 'shared': choose private, registered"),
        (
            ["--memory", "registered", "--transports", "torch"],
            "--memory registered is for transport shm and several ranks, not for torch and n = 4",
        ),
        (["--nproc", "1", "--memory", "registered", "--transports", "shm"], "--memory registered is for transport shm"),
        (
            ["--memory", "registered", "--transports", "torch,shm"],
            "--memory registered: transport torch has no other than private: name both",
        ),
        (["--ops", "barrier", "--plot", "x.png"], "--plot: barrier has no sizes to draw against: add another"),
        (["--sizes", "1Q"], "--sizes: '1Q' is no size"),
        (["--sizes", "64KB"], "--sizes: '64KB' is no size (did you mean '64K'?)"),
        (["--sizes", "one"], "--sizes: 'one' is no size: write bytes, or K, M, G of 1024"),
        (["--sizes=-1K"], "--sizes: '-1K': a size is at least 1 byte"),
        (["--sizes", "0"], "--sizes: '0': a size is at least 1 byte"),
        (["--sizes", "2K:1K"], "--sizes: '2K:1K': starts at 2048 bytes, above its end 1024"),
        (["--sizes", "1K:2K:1"], "--sizes: '1K:2K:1': the factor is 1, but sizes grow by at least 2"),
        (["--sizes", "1K:2K:x"], "--sizes: '1K:2K:x': a range is FROM:TO or FROM:TO:FACTOR"),
        (
            ["--sizes", "9000G", "--transports", "shm", "--memory", "registered"],
            "--sizes: 4 ranks x 6 buffers x 9000G = 216,000 GiB",
        ),
        (["--sizes", "9000G"], "--sizes: 4 ranks x 4 buffers x 9000G = 144,000 GiB, but this machine has"),
        (["--algorithms", "rnig"], "--algorithms: all_reduce has no 'rnig' (did you mean 'ring'?)"),
        (["--algorithms", "native,tree"], "--algorithms: all_reduce has no 'tree'"),
        (["--algorithms", ""], "--algorithms: nothing is named"),
        (["--nproc", "0"], "--nproc 0: at least 1"),
        (["--nproc", "100000"], "--nproc 100000: at most 8 processes for each of this machine's"),
        (["--nproc", "three"], "argument --nproc: invalid int value: 'three'"),
        (["--nproc", "1", "--ops", "send_recv"], "--ops send_recv: a group of one rank has no peer"),
        (["--nproc", "1", "--algorithms", "torch"], "--algorithms torch: a group of one rank has no torch group"),
        (["--nproc", "3", "--layout", "data=2"], "data(2) x pipeline(1) x tensor(1) = 2 ranks, but 3 were started"),
        (["--layout", "dta=2"], "--layout: unknown 'dta' (did you mean 'data'?)"),
        (["--iterations", "0"], "--iterations '0': auto, or a number of at least 1"),
        (["--iterations", "atuo"], "--iterations 'atuo' (did you mean 'auto'?)"),
        (["--warmup", "0"], "--warmup 0: at least 1"),
        (["--tolerance", "-1"], "--tolerance -1.0: 0 or more"),
        (["--baseline", "/no/such/file"], "/no/such/file is no result of this benchmark: FileNotFoundError"),
        (["--json", "/proc/no/file"], "--json /proc/no/file cannot be written"),
        (["--tune"], "--tune and --out FILE go together"),
        (["--out", "x.json"], "--tune and --out FILE go together"),
        (["--tune", "--out", "x.json", "--ops", "send_recv"], "--ops: unknown 'send_recv'"),
        (["--tune", "--out", "x.json", "--algorithms", "native"], "--tune: it measures all, not native"),
        (
            ["--overhead", "--sizes", "1K", "--check"],
            "--overhead measures one element and takes none of --sizes, --check",
        ),
        (["--overhead", "--nproc", "1"], "--overhead: axis data has one rank, where torch has no call: raise --nproc"),
        (["--overhead", "--layout", "data=2,pipeline=2,tensor=2"], "--overhead measures a group of one rank too, but "),
        (["--flie", "x"], "unrecognized arguments: --flie x"),
    ],
)
def test_a_wrong_command_ends_in_one_line_before_anything_runs(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.collectives.start_job", None)
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith(f"error: {text}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"meta": {}, "cases": []}', "KeyError('benchmark')"),
        ('{"meta": {"benchmark": "train_step"}, "rows": []}', "it is a result of 'train_step'"),
        ('{"meta": {"benchmark": "collectives"}, "rows": [{"op": "all_reduce"}]}', "TypeError"),
        (json.dumps({"meta": {"benchmark": "collectives"}, "rows": [asdict(replace(ROW, t_min=0.0))]}), "above 0"),
    ],
)
def test_a_foreign_baseline_is_refused(document: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(document)
    with pytest.raises(UsageError, match=r"old\.json is no result of this benchmark") as error:
        results.read(path)
    assert text in str(error.value)


def test_a_baseline_is_judged_before_the_run_and_only_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    results.save_json(path, {"benchmark": "collectives"}, [ROW])
    monkeypatch.setattr("benchmarks.collectives.start_job", None)
    assert main(["--ops", "all_reduce", "--sizes", "4K", "--nproc", "3", "--baseline", str(path)]) == 2
    assert f"error: --baseline {path}: this run measures none of its 1 rows" in capfd.readouterr().err
    results.save_json(path, {"benchmark": "collectives"}, [ROW, replace(ROW, algorithm="torch")])
    with pytest.raises(UsageError, match="this run measures none of its 2 rows"):  # of torch's own, and no engine
        check(parser("").parse_args(["--sizes", "4K", "--transports", "shm", "--baseline", str(path)]), None)
    options = ["--ops", "all_reduce", "--sizes", "4K", "--transports", "torch", "--baseline"]
    assert check(parser("").parse_args([*options, str(path)]), None).baseline == (ROW, replace(ROW, algorithm="torch"))
    for rank, more in (("1", []), ("0", ["--result", "x"])):  # the second was started by us
        monkeypatch.setenv("RANK", rank)
        assert check(parser("").parse_args([*options, "/no/such/file", *more]), 4).baseline is None
