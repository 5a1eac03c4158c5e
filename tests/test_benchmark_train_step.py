"""The training benchmark: its command line, its checks, and small runs of it, whole and broken."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers, results
from benchmarks.job import JobError, cause, run_job
from benchmarks.results import Case, LossError, Measured, check_losses
from benchmarks.train_step import main
from benchmarks.work import MODELS, Model, Work, parse_layout, parse_model, standard_set
from benchmarks.worker import batches, engine_step, proportional_set_size
from engine import Layout, plan_mesh
from engine.errors import LayoutError, UsageError
from tests.world import wait_until

TINY = "layers=2,hidden=16,heads=2,sequence=8,batch=4,vocabulary=32,microbatches=2"
SMALL_RUN = ["--model", TINY, "--rounds", "1", "--steps", "2", "--warm-up", "1", "--limit", "100"]


# ---- work as data ------------------------------------------------------------------------------------------------


def test_the_named_models_have_the_sizes_of_the_record() -> None:
    assert MODELS["default"] == Model(4, 256, 8, 128, 16, 4096, 8)
    assert MODELS["heavy"] == Model(4, 768, 8, 64, 4, 4096, 8)
    assert parse_model("heavy,layers=8") == Model(8, 768, 8, 64, 4, 4096, 8)
    assert parse_model("hidden=512, batch=8") == Model(4, 512, 8, 128, 8, 4096, 8)
    assert parse_layout("data=2, tensor=4") == Layout(data=2, tensor=4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: parse_layout("dta=2"), "--layout: unknown 'dta' (did you mean 'data'?)"),
        (lambda: parse_layout("data=2,data=4"), "--layout: data is given twice"),
        (lambda: parse_layout("data:2"), "'data:2' is not spelt name=number"),
        (lambda: parse_model("huge"), "--model 'huge': choose default or heavy, or size=number"),
        (lambda: parse_model("hidden=100"), "--model hidden=100 does not divide into heads=8"),
        (lambda: parse_model("batch=0"), "--model batch=0: every size is at least 1"),
        (lambda: Work(Layout(data=3), Model()), "a batch of 16 rows does not divide over data(3)"),
        (lambda: Work(Layout(data=2), Model(), accumulation=3), "8 rows of each data rank do not divide into 3"),
        (lambda: Work(Layout(), Model(), steps=0), "--steps 0: at least 1"),
    ],
)
def test_wrong_sizes_are_named(call: Any, text: str) -> None:
    with pytest.raises((UsageError, LayoutError)) as error:
        call()
    assert text in str(error.value)


def test_microbatches_are_the_models_in_a_pipeline_and_one_elsewhere() -> None:
    assert Work(Layout(pipeline=2), MODELS["default"]).microbatches == 8
    assert Work(Layout(data=2, pipeline=2), MODELS["heavy"]).microbatches == 2  # no more than its 2 rows
    assert Work(Layout(data=2), MODELS["default"]).microbatches == 1
    assert Work(Layout(data=2), MODELS["default"], accumulation=4).microbatches == 4


def test_the_standard_set_covers_the_layouts_and_peers_can_do_them() -> None:
    found = [
        (work.layout.data, work.layout.pipeline, work.layout.tensor, work.model_name) for work, _ in standard_set()
    ]
    sizes = [(2, 1, 1), (4, 1, 1)]
    assert found == [
        *[(*size, model) for size in sizes for model in ("default", "heavy")],
        (1, 1, 2, "default"), *[(1, n, 1, "default") for n in (2, 2, 4, 4)], (2, 2, 2, "default"),
    ]  # fmt: skip
    names = [work.name for work, _ in standard_set()]
    assert len(set(names)) == len(names)
    assert "pipeline 4, zero_bubble: default" in names
    for work, names in standard_set():
        assert [peers.find_peer(name, work) for name in names]
        assert Work.from_dict(json.loads(json.dumps(work.to_dict()))) == work


# ---- what is checked ---------------------------------------------------------------------------------------------


def test_losses_must_agree_in_every_step() -> None:
    check_losses("ddp", [8.0, 7.0], [8.0007, 7.0], 1e-4)
    for losses in ([8.0, 7.001], [float("nan"), 7.0]):
        with pytest.raises(LossError, match="ddp does other work than this engine: its loss of step"):
            check_losses("ddp", losses, [8.0, 7.0], 1e-4)


def test_pss_is_read_in_bytes() -> None:
    rollup = "55d0-7ffc ---p 00000000 00:00 0    [rollup]\nRss:   2048 kB\nPss:    1536 kB\nPss_Dirty:  12 kB\n"
    assert proportional_set_size(rollup) == 1536 * 1024


def failure(rank: int, code: int) -> str:
    return f"  time      : now\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7)\n"


def test_the_cause_is_what_the_rank_that_failed_first_says() -> None:
    log = "[rank0]: RuntimeError: connection closed by peer\n[rank1]: Traceback:\n[rank1]: ValueError: too small\n"
    log += "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nFailures:\n[1]:\n"
    log += failure(0, 1) + "Root Cause (first observed failure):\n[0]:\n" + failure(1, 1)
    assert cause(log) == "rank 1: ValueError: too small"
    lost = "[rank0]: RuntimeError: Connection reset by peer\n[rank1]: ValueError: too small\nRoot Cause:\n"
    assert cause(lost + failure(0, 1)) == "rank 1: ValueError: too small"


def test_a_killed_rank_is_the_cause_whatever_the_others_say_and_torchrun_ended() -> None:
    log = "[rank0]: RuntimeError: connection closed by peer\nFailures:\n[1]:\n" + failure(1, -9) + failure(2, -15)
    log += "Root Cause (first observed failure):\n[0]:\n" + failure(0, 1)
    assert cause(log) == "rank 1 was ended by signal 9 (SIGKILL)"
    assert cause("Root Cause (first observed failure):\n[0]:\n" + failure(1, 7)) == "rank 1 ended with exit code 7"
    assert cause("nothing") == "it said nothing"


def test_engine_and_plain_model_are_the_same_function() -> None:
    work = Work(Layout(), parse_model(TINY))
    ids = next(iter(batches(work, 1)))
    plain = peers.load(peers.PEERS["plain"].build)(work, torch.device("cpu"))
    ours = engine_step(work, plan_mesh(Layout(), 0))
    for _ in range(3):
        torch.testing.assert_close(ours(ids).float(), plain(ids), rtol=1e-6, atol=0)


def test_comparison_shows_seconds_ratios_and_what_came_and_went() -> None:
    old = [
        Case(
            Work(Layout(data=2), parse_model(TINY), steps=9),
            [Measured("engine", [2.0], [1.0], 10), Measured("ddp", [3.0], [1.0], 7)],
        )
    ]
    new = [
        Case(
            Work(Layout(data=2), parse_model(TINY)),
            [Measured("engine", [1.0], [1.0], 20), Measured("fsdp2", [2.0], [1.0], 5)],
        )
    ]
    columns = [list(column.cells) for column in results.comparison(old, new).columns]
    assert columns[1:] == [
        ["engine", "ddp", "fsdp2"],
        ["2.0000", "3.0000", "-"],
        ["1.0000", "-", "2.0000"],
        ["-50%", "gone", "new"],
        ["1.00x", "1.50x", "-"],
        ["1.00x", "-", "2.00x"],
        ["10", "7", "-"],
        ["20", "-", "5"],
    ]


# ---- whole runs --------------------------------------------------------------------------------------------------


def test_a_run_writes_tables_numbers_and_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    json_file, picture = tmp_path / "run.json", tmp_path / "run.png"
    command = ["--layout", "data=2", "--accumulation", "2", "--peers", "ddp,zero1,fsdp2", *SMALL_RUN]
    assert main([*command, "--json", str(json_file), "--plot", str(picture)]) == 0
    shown = capfd.readouterr().out
    for word in ("engine", "ddp", "zero1", "fsdp2", "bound: one process alone", "bound: no communication"):
        assert word in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = json.loads(json_file.read_text())
    assert {"date", "command", "versions", "hardware", "cores"} <= document["meta"].keys()
    systems = {each["system"]: each for each in document["cases"][0]["systems"]}
    assert [len(each["seconds"]) for each in systems.values()] == [2] * 6
    assert all(each["losses"][-1] < each["losses"][0] for each in systems.values() if each["losses"])
    assert all(each["memory_mib"] > 50 for each in systems.values() if each["losses"])
    assert main([*command[:4], *SMALL_RUN, "--compare", str(json_file)]) == 0
    assert "Against the older run" in capfd.readouterr().out


@pytest.mark.parametrize(("layout", "peer"), [("tensor=2", "dtensor"), ("pipeline=2", "torch_1f1b")])
def test_peers_of_the_other_axes_do_the_same_work(layout: str, peer: str) -> None:
    assert main(["--layout", layout, "--peers", peer, *SMALL_RUN]) == 0


def test_one_copy_of_the_parameters_is_timed_beside_the_engine_itself(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TRANSPORT", "shm")  # about memory that ranks share
    assert main(["--layout", "data=2", "--peers", "engine_shared", *SMALL_RUN]) == 0
    assert "engine_shared" in capfd.readouterr().out


def test_a_crashing_peer_makes_the_run_fail(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "run.json"
    command = ["--layout", "data=2", "--peers", "tests.bench_peers:crash", *SMALL_RUN, "--json", str(json_file)]
    assert main(command) == 1
    text = "error: tests.bench_peers:crash failed: rank 1: RuntimeError: the planted crash of rank 1; log: "
    assert text in capfd.readouterr().err
    assert not json_file.exists()


SMALL_WORK = Work(Layout(data=2), parse_model(TINY), steps=2, warm_up=1, limit=100)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"killed failed: rank 1 was ended by signal 9 \(SIGKILL\)"):
        run_job("tests.bench_peers:killed", SMALL_WORK, 2, tmp_path)


@pytest.fixture(scope="module")
def engine_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = run_job("engine", SMALL_WORK, 2, tmp_path_factory.mktemp("engine"))["losses"]
    return losses


@pytest.mark.parametrize(
    ("peer", "step"),
    [("other_loss", "1"), ("no_all_reduce", "2"), ("half_gradients", r"\d"), ("untrained_norms", r"\d")],
)
def test_other_work_shows_in_the_losses(engine_losses: list[float], peer: str, step: str, tmp_path: Path) -> None:
    losses = run_job(f"tests.bench_peers:{peer}", SMALL_WORK, 2, tmp_path)["losses"]
    with pytest.raises(LossError, match=f"{peer} does other work than this engine: its loss of step {step} is"):
        check_losses(peer, losses, engine_losses, 1e-4)


def runs(pid: str) -> bool:
    """Whether the process is there and is not one that has ended and waits to be collected."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_job_that_hangs_ends_at_its_limit_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("STUBBORN_FOLDER", str(folder))
    work = replace(SMALL_WORK, limit=60)

    class Hurried(subprocess.Popen):  # type: ignore[type-arg]
        """Reaches the limit as soon as both ranks hang."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == work.limit:
                wait_until(lambda: len(list(folder.iterdir())) == 2, timeout)
                timeout = 0.1
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Hurried)
    with pytest.raises(JobError, match=r"tests.bench_peers:stubborn ran past its limit of 60 s \(--limit\)"):
        run_job("tests.bench_peers:stubborn", work, 2, tmp_path)
    ranks = list(folder.iterdir())
    assert len(ranks) == 2
    assert not [rank.name for rank in ranks if runs(rank.name)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layout", "data=2", "--peers", "dpp"], "error: unknown peer 'dpp' (did you mean 'ddp'?)"),
        (["--layout", "tensor=2", "--peers", "ddp"], "error: peer ddp splits data only, so it cannot do the work of"),
        (["--layout", "data=2", "--nproc", "3"], "error: data(2) x pipeline(1) x tensor(1) = 2 ranks, but 3"),
        (["--layout", "data=-1"], "say how many with --nproc"),
        (["--layout", "data=2", "--peers", "no_such_package:build"], "the package no_such_package is not installed"),
        (["--layout", "data=2", "--compare", "/no/such/file"], "error: /no/such/file is no result of this benchmark"),
        (["--layout", "data=2", "--rounds", "0"], "error: --rounds 0: at least 1"),
        (["--layout", "data=1", "--peers", "ddp"], "error: peer ddp needs more than one process"),
        (["--layout", "data=2", "--schedule", "1b1f"], "error: schedule='1b1f'"),
        (["--layout", "data=2", "--limit", "nan"], "error: --limit nan: seconds above 0"),
        (["--layout", "data=2", "--plot", "x.svg"], "end the name in .png"),
        (["--layout", "data=2", "--peers", "tests.bench_peers:nothing"], "cannot be loaded: module"),
        (["--layout", "pipeline=2", "--accumulation", "1", "--peers", "torch_1f1b"], "microbatches as stages, 1 < 2"),
        (["--layout", "data=2", "--stage", "1", "--peers", "engine_shared"], "this engine at ZeRO stage 2 on the CPU"),
        (["--layout", "tensor=3"], "must divide over tensor(3)"),
        (["--layout", "pipeline=3"], "4 layers do not divide over pipeline(3)"),
        (["--layout", "data=2", "--json", "/proc/no/such"], "error: /proc/no/such cannot be written"),
        (["--standard", "--layout", "data=2", "--stage", "1"], "leave out --layout, --stage"),
    ],
)
def test_a_wrong_command_ends_before_anything_runs(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_a_missing_peer_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["--layout", "data=2", "--peers", "deepspeed"]) == 2
    assert capfd.readouterr().err == (
        "error: peer deepspeed was asked for, but the package deepspeed is not installed: run `make peers`\n"
    )
