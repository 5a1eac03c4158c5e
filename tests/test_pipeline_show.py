"""Pictures of schedules: what is drawn is what was simulated, and what cannot be drawn is said in one line."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from engine.pipeline.plot import COLOURS, IDLE, Panel, figure_of
from engine.pipeline.schedules import SCHEDULES
from engine.pipeline.show import main, timeline_of, title_of


def luminance(colour: str) -> float:
    """As seen, whatever the hue. Formula: WCAG 2, relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_kinds_differ_in_lightness_alone() -> None:
    kinds = ["forward", "input_gradient", "weight_gradient"]
    seen = sorted(luminance(COLOURS[kind]) + 0.05 for kind in kinds)
    assert min(b / a for a, b in itertools.pairwise(seen)) > 1.4
    assert luminance(IDLE) / luminance(COLOURS["weight_gradient"]) > 1.2


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_computation_is_a_box_with_its_microbatch_at_its_time(name: str) -> None:
    timeline = timeline_of(name, 3, 5)
    axes = figure_of([Panel("", timeline)]).axes[0]
    wanted = sorted(
        (rank, round(e.start, 9), round(e.end, 9), COLOURS[e.action.kind])
        for rank, events in enumerate(timeline.ranks)
        for e in events
    )
    colours = {to_rgb(colour): colour for colour in COLOURS.values()}
    boxes = [box for box in axes.patches if box.get_facecolor()[:3] in colours]
    found = [
        (round(b.get_y() + b.get_height() / 2), round(b.get_x(), 9), round(b.get_x() + b.get_width(), 9),
         colours[b.get_facecolor()[:3]])
        for b in boxes
    ]  # fmt: skip
    assert sorted(found) == wanted
    middles = {(round(t.get_position()[0], 9), round(t.get_position()[1])): t.get_text() for t in axes.texts}
    for rank, events in enumerate(timeline.ranks):
        for event in events:
            assert middles[round((event.start + event.end) / 2, 9), rank] == str(event.action.microbatch)
    idle = [box for box in axes.patches if box.get_facecolor()[:3] == to_rgb(IDLE)]
    assert [(box.get_x(), box.get_width()) for box in idle] == [(0, pytest.approx(timeline.step))] * 3


def test_the_title_has_the_bubble_and_the_memory() -> None:
    assert title_of("1f1b", 8, timeline_of("1f1b", 4, 8)) == (
        "1f1b: 4 stages, 8 microbatches: bubble 27.3%, a step takes 33, memory up to 4 activations of a stage"
    )
    assert title_of("interleaved", 8, timeline_of("interleaved", 4, 8)) == (
        "interleaved: 4 stages of 2 chunks, 8 microbatches: bubble 15.8%, a step takes 28.5, memory up to 5.5 "
        "activations of a stage"
    )


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pictures" / "v.png"
    options = ["--schedule", "zero_bubble_v", "--stages", "2", "--microbatches", "3", "--message", "0.1"]
    assert main([*options, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "zero_bubble_v: 2 stages of 2 chunks, 3 microbatches: bubble" in said
    assert str(out) in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"--schedule": "1f1B"}, "schedule='1f1B' (did you mean '1f1b'?): choose 1f1b, gpipe, interleaved"),
        ({"--stages": "0"}, "ranks=0: a pipeline has at least 1 rank"),
        ({"--microbatches": "0"}, "microbatches=0: a step has at least 1"),
        ({"--chunks": "2"}, "1f1b has one chunk on each rank, not 2 on 2 ranks"),
        ({"--chunks": "0"}, "chunks=0: a pipeline has at least 1 rank, and 1 chunk"),
        ({"--forward": "-1"}, "forward=-1.0: costs are at least 0"),
        ({"--out": "a.xyz"}, "a.xyz is no kind of picture that can be drawn: end it in .png, .pdf or .svg"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    options: dict[str, str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--schedule": "1f1b", "--stages": "2", "--microbatches": "3", "--out": str(tmp_path / "a.png"), **options}
    assert main([word for pair in given.items() for word in pair]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m engine.pipeline.show: ")
    assert text in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    options = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "3", "--out", str(tmp_path / "a.png")]
    assert main(options) == 2
    assert "a picture needs matplotlib: pip install 'engine3d[examples]'" in capsys.readouterr().err
