"""The collectives benchmark's table of ratios: torch's own time / ours, against literal times."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.collectives import finish, main
from benchmarks.collectives_case import Row
from benchmarks.collectives_options import check, parser
from benchmarks.collectives_ratios import GOAL, GOAL_SIZES, markdown, means, ratios, to_dict
from benchmarks.collectives_results import read

TORCH = Row("all_reduce", "gloo", "torch", "torch", "cpu", "float32", 4, 1024, 256, True, 8.0, 20.0, 30, 40, 1, 1, 0)
OURS = replace(TORCH, transport="shm", algorithm="chosen", t_min=2.0, t_p50=10.0)
LARGE = (1 << 20) + 4


def whole_goal(dtype: str, algorithm: str) -> list[Row]:
    """torch takes 8 (least) and 20 (median) on each; the engine a quarter of the least, but on broadcast half of it,
    and at the median half."""
    rows = []
    for op in dict.fromkeys(op for op, _ in GOAL):
        first = op in ("all_reduce", "broadcast")  # whether its first form is in place; they have no other
        for size, in_place in product(GOAL_SIZES, {first, True}):
            case = {"op": op, "bytes": size, "in_place": in_place, "dtype": dtype}
            rows.append(replace(TORCH, **case))
            # The second form, which must not count, takes no time.
            t_min, t_p50 = (4.0 if op == "broadcast" else 2.0, 10.0) if in_place == first else (0.001, 0.001)
            for memory in ("private", "registered"):
                rows.append(replace(OURS, **case, algorithm=algorithm, memory=memory, t_min=t_min, t_p50=t_p50))
    return rows


def test_a_ratio_is_of_the_minimum_up_to_1_mib_and_of_the_median_above() -> None:
    at_large = {"bytes": LARGE}
    rows = [TORCH, OURS, replace(TORCH, **at_large), replace(OURS, **at_large)]
    assert [(each.by_size, each.by_median) for each in ratios(rows)] == [(4.0, 2.0), (2.0, 2.0)]


@pytest.mark.parametrize(
    "other", [{"dtype": "float64"}, {"bytes": 2048}, {"in_place": False}, {"n": 2}, {"op": "reduce"}]
)
def test_only_the_same_case_is_compared(other: dict[str, object]) -> None:
    assert ratios([replace(TORCH, **other), OURS]) == []  # type: ignore[arg-type]
    assert markdown([]) == "Nothing of the engine's was measured beside torch's own call."


@pytest.mark.parametrize("algorithm", ["chosen", "native"])
def test_the_mean_is_geometric_over_the_first_form_of_all_rows(algorithm: str) -> None:
    (mean,) = means(ratios(whole_goal("float32", algorithm)))
    assert (mean.dtype, mean.algorithm, mean.missing) == ("float32", algorithm, ())
    # 16 rows of 4 and 4 broadcasts of 2 by the least time; the row of 64 MiB counts its median, 2, everywhere.
    assert mean.by_size == pytest.approx((4.0**12 * 2.0**3 * 2.0**5) ** (1 / 20))
    assert mean.by_median == pytest.approx(2.0)


def test_a_mean_with_a_row_missing_is_none_and_is_not_printed() -> None:
    rows = [row for row in whole_goal("float32", "chosen") if (row.op, row.bytes) != ("broadcast", 64 << 20)]
    (mean,) = means(ratios(rows))
    assert (mean.by_size, mean.by_median, mean.missing) == (None, None, ("broadcast private 64 MiB",))
    assert "Geometric mean" not in markdown(ratios(rows))
    assert "64 KiB, 1 MiB, 64 MiB: **" in markdown(ratios(whole_goal("float32", "chosen")))


def test_each_dtype_has_a_mean_and_only_shared_memory_counts() -> None:
    rows = [*whole_goal("float32", "chosen"), TORCH, replace(OURS, transport="torch", dtype="float32", t_min=0.001)]
    other = [replace(TORCH, dtype="float64"), replace(OURS, dtype="float64", transport="torch")]
    first, second = means(ratios([*rows, *other]))
    assert first.by_size == means(ratios(whole_goal("float32", "chosen")))[0].by_size
    assert (second.dtype, second.algorithm, len(second.missing)) == ("float64", "chosen", 20)


def test_the_tables_are_markdown() -> None:
    large = {"bytes": LARGE, "t_p50": 100.0}
    barrier = {"op": "barrier", "bytes": 0, "dtype": "uint8", "in_place": False}
    rows = [TORCH, OURS, replace(TORCH, **large), replace(OURS, **{**large, "t_p50": 8.0}, memory="registered")]
    rows += [replace(TORCH, **barrier), replace(OURS, **barrier)]
    lines = markdown(ratios(rows)).splitlines()
    assert lines[0].startswith("4 ranks, float32: torch's own call / the engine's, above 1 the engine is faster.")
    assert lines[2:6] == [
        "| operation | place | transport | algorithm | memory | 1 KiB | 1048580 B |",
        "|---|---|---|---|---|---|---|",
        "| all_reduce | in | shm | `chosen` | private | 4.00 |  |",
        "| all_reduce | in | shm | `chosen` | registered |  | 12.50 |",
    ]
    assert lines[7] == "All by medians:"
    assert lines[11] == "| all_reduce | in | shm | `chosen` | private | 2.00 |  |"
    assert lines[-1] == "4 ranks, barrier over shm, `chosen`: 4.00, by medians 2.00."


def test_they_are_printed_and_written_beside_the_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, rows = tmp_path / "run.json", [TORCH, OURS]
    settings = check(parser("").parse_args(["--ratios", "--sizes", "1K", "--json", str(out)]), None)
    assert finish(settings, {"benchmark": "collectives"}, rows) == 0
    document = json.loads(out.read_text())
    assert document["ratios"] == to_dict(ratios(rows))
    assert document["ratios"]["rows"] == [
        {
            "op": "all_reduce", "transport": "shm", "algorithm": "chosen", "memory": "private", "dtype": "float32",
            "n": 4, "bytes": 1024, "in_place": True, "ratio": 4.0, "ratio_p50": 2.0,
        }
    ]  # fmt: skip
    assert document["ratios"]["geometric_mean"][0]["ratio"] is None
    assert "| all_reduce | in | shm | `chosen` | private | 4.00 |" in capfd.readouterr().out
    assert read(out) == (TORCH, OURS)
    assert finish(replace(settings, ratios=False), {"benchmark": "collectives"}, rows) == 0
    assert json.loads(out.read_text()).keys() == {"meta", "rows"}


@pytest.mark.parametrize("options", [["--algorithms", "native"], ["--algorithms", "torch"], ["--nproc", "1"]])
def test_ratios_of_nothing_are_refused(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--ratios", *options]) == 2
    assert "error: --ratios divides torch's time by ours, and --algorithms" in capfd.readouterr().err


def test_an_overhead_has_no_ratios(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--ratios", "--overhead"]) == 2
    assert "takes none of --ratios" in capfd.readouterr().err
