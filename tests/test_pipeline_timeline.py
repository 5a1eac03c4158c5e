"""Recorded timelines: what ran, in the plan's order, on clocks in line; their files, their pictures, and what is
refused.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine
from engine import Layout, PipelineModel
from engine import device as devices
from engine.errors import UsageError
from engine.pipeline.measured import Computed, Measured, read
from engine.pipeline.recording import Recording
from engine.pipeline.schedule import Compute, Stages
from engine.pipeline.schedules import MADE_FOR, SCHEDULES, one_f_one_b
from engine.pipeline.show import main, table_of
from engine.pipeline.simulate import Costs, simulate
from examples.gpt.model import GPTConfig, gpt_layers, next_token_loss
from tests.test_pipeline_chunks import eager
from tests.world import World

SIZES = {"layers": 6, "hidden": 8, "heads": 2, "sequence": 4, "vocabulary": 12}
MICROBATCHES, STEPS = 3, 2


def trained(mesh: engine.Mesh, schedule: Any, file: str) -> dict[str, Any]:
    """One step that is not recorded, two that are, and one after them."""
    chunks, placement = MADE_FOR.get(schedule, (1, "loop")) if isinstance(schedule, str) else (1, "loop")
    layers = gpt_layers(GPTConfig(**SIZES, tied=False), mesh.tensor)
    model = PipelineModel(layers, mesh, balance="uniform", chunks=chunks, placement=placement)
    optimizer = engine.zero.ZeroOptimizer(model, torch.optim.SGD, mesh, lr=0.1)
    loss, spent = next_token_loss(mesh.tensor), []

    def timed(output: Any, target: Any) -> Any:
        started = time.perf_counter()
        result = loss(output, target)
        spent.append(time.perf_counter() - started)
        return result

    step = engine.TrainStep(model, optimizer, timed, mesh, microbatches=MICROBATCHES, schedule=schedule)
    ids = torch.arange(2 * MICROBATCHES * mesh.data.size * 5).reshape(-1, 5) % SIZES["vocabulary"]
    own = ids[mesh.data.rank * 2 * MICROBATCHES :][: 2 * MICROBATCHES]
    inputs, targets = own[:, :-1], own[:, 1:]
    losses = [step(inputs, targets).loss.item()]
    with step.record() as recording:
        with pytest.raises(UsageError, match="nothing is recorded: train at least one step inside"):
            recording.gather()
        with pytest.raises(UsageError, match="being recorded already"), step.record():
            pass
        started = time.perf_counter()
        losses += [step(inputs, targets).loss.item() for _ in range(STEPS)]
        took = time.perf_counter() - started
        step.evaluate(inputs, targets)
    losses.append(step(inputs, targets).loss.item())
    recording.save(file)
    recorded = spent[MICROBATCHES : MICROBATCHES * (1 + STEPS)]
    return {"losses": losses, "took": took, "measured": recording.gather(), "spent": recorded}


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", Layout(pipeline=3)), ("gpipe", Layout(pipeline=2)), ("interleaved", Layout(pipeline=2)),
        ("gpipe", Layout(data=2, pipeline=2)), (eager, Layout(pipeline=2)), ("1f1b", Layout()),
        ("zero_bubble", Layout(pipeline=2)), ("zero_bubble_v", Layout(pipeline=2)),
    ],
)  # fmt: skip
def test_what_is_recorded_is_the_plan_in_time(world: World, schedule: Any, layout: Layout, tmp_path: Path) -> None:
    file = tmp_path / "runs" / "timeline.json"
    results = world.run(layout, trained, schedule, str(file))
    stages = Stages(layout.pipeline, *(MADE_FOR.get(schedule, (1, "loop")) if isinstance(schedule, str) else ()))
    plan = (SCHEDULES[schedule] if isinstance(schedule, str) else schedule)(stages, MICROBATCHES)
    pipelines: dict[tuple[int, int], list[Measured]] = {}
    for rank, result in enumerate(results):
        assert result["losses"] == sorted(result["losses"], reverse=True)
        here = layout.coordinate(rank)
        pipelines.setdefault((here.data, here.tensor), []).append(result["measured"])
        last = [e for ranks in result["measured"].steps for rank in ranks for e in rank
                if (e.action.kind, e.action.stage) == ("forward", stages.count - 1)]  # fmt: skip
        for forward, seconds in zip(last, result["spent"], strict=bool(result["spent"])):
            assert forward.end - forward.start > seconds  # the loss is a part of the last stage's forward
    assert any(result["spent"] for result in results)
    for every in pipelines.values():
        measured = every[0]
        assert all(each == measured for each in every)
        assert measured.schedule == (schedule if isinstance(schedule, str) else "eager")
        assert (measured.stages, measured.microbatches, len(measured.steps)) == (stages, MICROBATCHES, STEPS)
        for ranks in measured.steps:
            assert [[each.action for each in rank] for rank in ranks] == [list(actions) for actions in plan]
            check_times(ranks, max(result["took"] for result in results), stages)
    assert read(file) == results[0]["measured"]
    assert main(["--measured", str(file), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def check_times(ranks: Any, limit: float, stages: Stages) -> None:
    """Each rank does one thing after another, and nothing before what it needs has ended on another rank."""
    ended: dict[tuple[str, int, int], float] = {}
    for rank in ranks:
        times = [moment for each in rank for moment in (each.start, each.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] < limit
        for each in rank:
            kind = "forward" if each.action.kind == "forward" else "backward"
            ended[kind, each.action.stage, each.action.microbatch] = each.end
            assert each.held is None or len(each.held) == 2
    for each in (each for rank in ranks for each in rank):
        stage, i = each.action.stage, each.action.microbatch
        if each.action.kind == "forward" and stage > 0:
            assert each.start >= ended["forward", stage - 1, i]
        if each.action.kind == "backward":
            before = ("forward", stage, i) if stage == stages.count - 1 else ("backward", stage + 1, i)
            assert each.start >= ended[before]


# ---- what it is made of ------------------------------------------------------------------------------------------


def test_memory_in_use_is_what_tensors_take_and_no_more() -> None:
    before = devices.live_memory(torch.device("cpu"))
    if before is None:  # without glibc it is not known
        return
    held = [torch.empty(10_000_000), *(torch.empty(1000) for _ in range(100))]
    during = devices.live_memory(torch.device("cpu"))
    assert during is not None
    wanted = sum(each.nbytes for each in held)
    assert wanted <= during - before < wanted + 2**17
    del held
    after = devices.live_memory(torch.device("cpu"))
    assert after is not None
    assert abs(after - before) < 2**17


def test_on_an_accelerator_marks_are_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")
            self.at = float(len(calls))

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 250  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4096 + device.index)
    here = torch.device("cuda", 3)
    first, last = devices.mark(here), devices.mark(here)
    assert calls == ["record", "record"]
    assert devices.seconds_between(first, last) == 0.25
    assert devices.live_memory(here) == 4099


def test_clocks_of_one_machine_are_one_and_of_several_start_when_the_ranks_meet() -> None:
    """Rank 1 leaves the meeting 0.25 s after rank 0."""
    for hosts, late in ((("a", "a"), 0.25), (("a", "b"), 0.0)):
        told = [
            (host, [(100 + 0.25 * rank, (Computed(Compute("forward", rank, 0), 0.5, 1.0),))])
            for rank, host in enumerate(hosts)
        ]
        comm = SimpleNamespace(size=2, broadcast_object=lambda _, rank, told=told: told[rank])
        recording = Recording(SimpleNamespace(pipeline=comm), "own", Stages(2), 1)  # type: ignore[arg-type]
        (step,) = recording.gather().steps
        assert [(rank[0].start, rank[0].end) for rank in step] == [(0.5, 1.0), (0.5 + late, 1.0 + late)]


def test_a_backward_may_have_a_cost_of_its_own_and_units_may_change() -> None:
    plan, stages = one_f_one_b(Stages(2), 3), Stages(2)
    apart, whole = (simulate(plan, stages, 3, costs) for costs in (Costs(1, 2, 1.5), Costs(1, backward=3.5)))
    assert whole == apart
    scaled = whole.scaled(1e3, 0.5)
    assert (scaled.step, scaled.bubble) == (whole.step * 1e3, pytest.approx(whole.bubble))
    assert scaled.memory == (1.0, 0.5)


# ---- what is derived from it, by hand ----------------------------------------------------------------------------


def by_hand() -> Measured:
    """Two ranks, two microbatches of 1F1B. Forwards take 1 and 2 s, backwards 3 and 4, all messages 0.5; in the second
    step everything takes twice as long."""

    def rank(stage: int, kept: int, times: list[tuple[str, int, float, float]]) -> tuple[Computed, ...]:
        held, found = 0, []
        for kind, i, start, end in times:
            change = kept if kind == "forward" else -kept
            found.append(Computed(Compute(kind, stage, i), start, end, (held, held + change)))  # type: ignore[arg-type]
            held += change
        return tuple(found)

    def step(by: float) -> Any:
        first = [("forward", 0, 0.0, 1.0), ("forward", 1, 1.0, 2.0), ("backward", 0, 8.0, 11.0),
                 ("backward", 1, 14.0, 17.0)]  # fmt: skip
        second = [("forward", 0, 1.5, 3.5), ("backward", 0, 3.5, 7.5), ("forward", 1, 7.5, 9.5),
                  ("backward", 1, 9.5, 13.5)]  # fmt: skip
        return tuple(
            rank(stage, kept, [(kind, i, start * by, end * by) for kind, i, start, end in times])
            for stage, kept, times in ((0, 2**20, first), (1, 3 * 2**20, second))
        )

    return Measured("1f1b", Stages(2), 2, (step(1.0), step(2.0), step(1.0)))


def test_bubble_costs_and_simulation_of_a_timeline_by_hand(tmp_path: Path) -> None:
    measured = by_hand()
    assert tuple(map(tuple, measured.plan)) == one_f_one_b(Stages(2), 2)
    timeline = measured.timeline()
    assert timeline.step == 17
    assert [timeline.busy(rank) for rank in (0, 1)] == [8, 12]
    assert timeline.memory == (2 * 2**20, 3 * 2**20)
    assert measured.bubble() == pytest.approx(1 - 20 / 34)
    assert measured.timeline(1).step == 34
    costs = measured.costs()
    assert (costs.forward, costs.backward, costs.activation) == ([1, 2], [3, 4], [2**20, 3 * 2**20])
    simulated = measured.simulated()
    # Rank 1 starts after a forward of 1, computes for 12, then rank 0's last backward takes 3.
    assert simulated.step == 16
    assert simulated.memory == timeline.memory
    measured.save(tmp_path / "a.json")
    assert read(tmp_path / "a.json") == measured


def test_the_table_has_both_side_by_side() -> None:
    lines = [line.split() for line in table_of(by_hand()).splitlines()]
    assert lines[0] == ["rank", "busy", "ms", "idle", "ms", "bubble", "memory", "MiB"]
    assert lines[1:] == [
        ["measured", "0", "8000.00", "9000.00", "52.9%", "2.0"],
        ["1", "12000.00", "5000.00", "29.4%", "3.0"],
        ["all", "20000.00", "14000.00", "41.2%", "3.0"],
        ["simulated", "0", "8000.00", "8000.00", "50.0%", "2.0"],
        ["1", "12000.00", "4000.00", "25.0%", "3.0"],
        ["all", "20000.00", "12000.00", "37.5%", "3.0"],
        ["bubble", "of", "3", "recorded", "steps,", "median:", "41.2%"],
    ]


def test_weight_gradients_apart_have_costs_of_their_own() -> None:
    times = {"forward": (0.0, 1.0, (0, 100)), "input_gradient": (1.0, 3.0, (100, 40)),
             "weight_gradient": (3.0, 6.0, (40, 0))}  # fmt: skip
    rank = tuple(Computed(Compute(kind, 0, 0), *times[kind]) for kind in times)  # type: ignore[arg-type]
    costs = Measured("zero_bubble", Stages(1), 1, ((rank,),)).costs()
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == ([1], [2], [3])
    assert (costs.activation, costs.kept) == ([100], [40])


def test_files_that_are_no_timeline_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.json"
    by_hand().save(good)

    def broken(change: Any) -> str:
        document = json.loads(good.read_text())
        change(document)
        file = tmp_path / "broken.json"
        file.write_text(json.dumps(document))
        assert main(["--measured", str(file), "--out", str(tmp_path / "a.png")]) == 2
        return capsys.readouterr().err

    assert "is no recorded timeline: it has no step" in broken(lambda d: d["steps"].clear())
    assert "rank 0 never computes the backward of stage 0" in broken(lambda d: d["steps"][0][0].pop())
    assert "step 1 has other computations than step 0" in broken(lambda d: d["steps"][1][1].reverse())
    assert "step 2, rank 1: its times go back" in broken(lambda d: d["steps"][2][1][0].update(end=0.1))
    assert "'ranks'" in broken(lambda d: d["stages"].pop("ranks"))
    assert "KeyError('stages')" in broken(lambda d: d.pop("stages"))
    assert "IndexError(" in broken(lambda d: d["steps"][0][0][0].update(held=[]))
    assert "OverflowError(" in broken(lambda d: d.update(microbatches=float("inf")))
    assert "it has 1000000000000 microbatches" in broken(lambda d: d.update(microbatches=10**12))
    assert "chunks=1000000000000" in broken(lambda d: d["stages"].update(chunks=10**12))
    for odd in (float("nan"), float("inf")):
        text = broken(lambda d, odd=odd: d["steps"][1][0][-1].update(end=odd))
        assert "step 1, rank 0: its times are not all numbers" in text
    assert main(["--measured", str(tmp_path / "none.json"), "--out", "a.png"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["--measured", str(good), "--stages", "2", "--forward", "2", "--out", "a.png"]) == 2
    assert "leave out --stages, --forward" in capsys.readouterr().err
    assert main(["--schedule", "1f1b", "--out", "a.png"]) == 2
    assert "--stages, --microbatches missing" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))
