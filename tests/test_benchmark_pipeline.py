"""The pipeline benchmark: its command line, what it makes of its numbers, and the smallest run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import engine
from benchmarks import pipeline_results
from benchmarks.engine_model import engine_model
from benchmarks.peers import PEERS
from benchmarks.peers.gpt import gpt, halves
from benchmarks.peers.schedules import even_cut
from benchmarks.pipeline import main, parser, run_all, works_of
from benchmarks.pipeline_results import System
from benchmarks.pipeline_worker import TIMELINE, overhead, trivial_pipeline
from benchmarks.results import Case, LossError
from benchmarks.work import MODELS, Model, Work, parse_model
from engine import Layout
from engine.errors import UsageError
from engine.pipeline.measured import read
from engine.pipeline.schedules import SCHEDULES
from tests.test_pipeline_timeline import by_hand
from tests.world import World

TINY = "layers=4,hidden=16,heads=2,sequence=8,batch=4,vocabulary=32"
SMALL_RUN = ["--nproc", "2", "--microbatches", "2", "--model", TINY, "--rounds", "1", "--steps", "1", "--warm-up", "1",
             "--limit", "100"]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "has no pipeline to measure: give --nproc 2, or --layout pipeline=2"),
        (["--layout", "data=2"], "has no pipeline to measure"),
        (["--nproc", "3", "--layout", "pipeline=2"], "= 2 ranks, but 3"),
        (["--nproc", "2", "--schedules", "1f1B"], "schedule='1f1B' (did you mean '1f1b'?)"),
        (["--nproc", "2", "--peers", "trch"], "unknown peer 'trch'"),
        (["--nproc", "2", "--peers", "ddp"], "peer ddp splits data only"),
        (["--nproc", "2", "--microbatches", "3"], "16 rows of each data rank do not divide into 3 microbatches"),
        (["--nproc", "4", "--microbatches", "2"], "at least as many microbatches as stages, 2 < 4"),
        (["--nproc", "4", "--schedules", "interleaved"], "4 layers do not divide over pipeline(4) x 2 chunks of inter"),
        (["--nproc", "3", "--schedules", "all"], "no schedule is left: 1f1b is left out: 4 layers do not divide over"),
        (["--nproc", "2", "--rounds", "0"], "--rounds 0: at least 1"),
        (["--nproc", "2", "--steps", "0"], "--steps 0: at least 1"),
        (["--nproc", "2", "--plot", "x.svg"], "end the name in .png"),
        (["--nproc", "2", "--timelines", "/proc/no/such"], "/proc/no/such/probe cannot be written"),
    ],
)
def test_a_wrong_command_ends_before_anything_runs(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("error: ")
    assert text in captured.err
    assert captured.out == ""


def test_all_takes_the_schedules_that_fit_and_says_which_do_not() -> None:
    works, left_out = works_of(parser().parse_args(["--nproc", "2", "--schedules", "all"]))
    assert [work.schedule for work in works] == list(SCHEDULES)
    assert left_out == []
    assert {work.microbatches for work in works} == {8}
    assert [(work.stages.chunks, work.stages.placement) for work in works] == [
        (1, "loop"), (1, "loop"), (2, "loop"), (1, "loop"), (2, "v"),
    ]  # fmt: skip
    works, left_out = works_of(parser().parse_args(["--layout", "pipeline=4", "--schedules", "all"]))
    assert [work.schedule for work in works] == ["1f1b", "gpipe", "zero_bubble"]
    assert [line.partition(":")[0] for line in left_out] == ["interleaved is left out", "zero_bubble_v is left out"]


def test_the_peers_two_cuts() -> None:
    work = Work(Layout(pipeline=2), MODELS["default"])
    assert even_cut(work) == [range(3), range(3, 6)]
    ours = engine_model(work, engine.plan_mesh(work.layout, 0)).stages
    assert ours == (range(6), range(6, 10))  # 2 and a half blocks and 1 and a half: the head is heavy
    assert len(halves(gpt(work.model, work.seed))) == 10, "the peers' model can be cut there too"
    looped = Work(Layout(pipeline=2), Model(), schedule="interleaved")
    assert even_cut(looped) == [range(2), range(2, 3), range(3, 4), range(4, 6)]


def test_ratios_are_against_the_engine_and_torchs_1f1b() -> None:
    def case(schedule: str, *seconds: float) -> Case:
        names = ("engine", "torch_pipeline", "torch_pipeline_balanced")
        systems = [
            System(name, [each], [2.0, 1.5], 9.0, ranks_mib=[12.0, 3.25])
            for name, each in zip(names, seconds, strict=True)
        ]
        return Case(Work(Layout(pipeline=2), parse_model(TINY), f"own, {schedule}", 2, schedule), list(systems))

    cases = [case("1f1b", 1.0, 1.2, 1.1), case("gpipe", 0.8, 1.6, 2.0)]
    found = cases[0].systems[0]
    assert isinstance(found, System)
    found.add_steps(by_hand())
    columns = [[str(cell) for cell in column.cells] for column in pipeline_results.table(cases).columns]
    assert columns[0] == ["1f1b", "  engine", "  torch", "  torch, engine's cut",
                          "gpipe", "  engine", "  torch", "  torch, engine's cut"]  # fmt: skip
    assert columns[4] == ["", "1.00x", "1.20x", "1.10x", "", "1.00x", "2.00x", "2.50x"]
    assert columns[5] == ["", "1.20x", "1.00x", "1.09x", "", "1.50x", "0.75x", "0.60x"]
    assert [column[1] for column in columns[6:]] == ["41.2%", "37.5%", "2.0 / 3.0", "2.0 / 3.0", "12 / 3.2", "1.50000"]
    assert columns[6][2] == columns[8][2] == ""
    without = pipeline_results.table(cases[1:])
    assert [str(cell) for cell in without.columns[5].cells] == ["", "-", "-", "-"]
    Console(width=200, quiet=True).print(pipeline_results.table(cases))


def overheads(mesh: engine.Mesh, schedule: str) -> Any:
    work = Work(mesh.layout, parse_model(TINY), "tiny", 4, schedule)
    trivial = trivial_pipeline(work, mesh)
    gradients = []
    for run in (trivial.plain, trivial.run):
        trivial.optimizer.zero_grad()
        run()
        trivial.optimizer.finish_gradients(1)
        gradients.append({name: value.item() for name, value in trivial.optimizer.full_gradients().items()})
    trivial.optimizer.zero_grad()
    return gradients, trivial.actions, overhead(work, mesh)


@pytest.mark.parametrize(("schedule", "kinds"), [("1f1b", 2), ("zero_bubble", 3)])
def test_the_overhead_is_of_the_same_forwards_and_backwards(world: World, schedule: str, kinds: int) -> None:
    for gradients, actions, seconds in world.run(Layout(pipeline=2), overheads, schedule):
        assert gradients == [{"0.weight": 4.0, "1.weight": 4.0}] * 2
        assert actions == kinds * 4
        assert 0 < seconds < 1  # microseconds on an idle machine, more where others run beside it


def test_the_smallest_run_has_every_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers, picture, folder = tmp_path / "run.json", tmp_path / "run.png", tmp_path / "timelines"
    files = ["--json", str(numbers), "--plot", str(picture), "--timelines", str(folder)]
    assert main([*SMALL_RUN, "--schedules", "interleaved", "--peers", "torch_pipeline_balanced", *files]) == 0
    shown = capfd.readouterr().out
    assert "torch, engine's cut" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = json.loads(numbers.read_text())
    ours, torchs = document["cases"][0]["systems"]
    assert 0 < ours["simulated_bubble"] < 1
    assert 0 < ours["bubble"] < 1
    assert [len(each["ranks_mib"]) for each in (ours, torchs)] == [2, 2]
    assert min(*ours["ranks_mib"], *torchs["ranks_mib"], *ours["activations_mib"]) > 0
    assert torchs["bubble"] is None
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-4)
    recorded = read(folder / "interleaved.json")
    assert (recorded.schedule, recorded.microbatches, recorded.stages.chunks) == ("interleaved", 2, 2)
    assert (folder / "interleaved.png").read_bytes().startswith(b"\x89PNG")


def test_systems_take_turns_and_must_have_one_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[tuple[str, str]] = []
    losses = {"engine": [2.0, 1.0], "torch_pipeline": [2.0, 1.0001]}

    def job(system: str, work: Work, _processes: int, folder: Path, _worker: str) -> dict[str, Any]:
        jobs.append((work.schedule, system))
        by_hand().save(folder / TIMELINE)
        ranks = [float(len(jobs)), 5.0]
        return {"seconds": [1.0, 3.0, 2.0], "losses": losses[system], "memory_mib": 7.0, "ranks_mib": ranks}

    monkeypatch.setattr("benchmarks.pipeline.run_job", job)
    works = [Work(Layout(pipeline=2), parse_model(TINY), "own", 2, schedule) for schedule in ("1f1b", "gpipe")]
    peers = {"torch_pipeline": PEERS["torch_pipeline"]}
    cases, recorded = run_all(works, peers, 2, tmp_path)
    there = [(work.schedule, system) for work in works for system in ("engine", "torch_pipeline")]
    assert jobs == [*there, *there[::-1]]
    assert [len(steps.steps) for steps in recorded.values()] == [6, 6]
    last = cases[0].systems[0]
    assert isinstance(last, System)
    assert (last.median, last.seconds, last.ranks_mib) == (2.0, [1.0, 3.0, 2.0] * 2, [8.0, 5.0])
    losses["torch_pipeline"] = [2.0, 1.001]
    with pytest.raises(LossError, match=r"torch: 1f1b does other work than this engine: its loss of step 2 is 1\.001"):
        run_all(works, peers, 1, tmp_path)


def test_peers_may_be_none() -> None:
    assert parser().parse_args(["--peers", "none"]).peers == []
    assert parser().parse_args(["--peers", "torch"]).peers == parser().parse_args([]).peers
    with pytest.raises(UsageError, match="no schedule is left: --schedules names none"):
        works_of(parser().parse_args(["--nproc", "2", "--schedules", ""]))
