"""The memory benchmark: its formulas, its counting, and the smallest run of it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.memory import main
from benchmarks.memory_kinds import KINDS, OWNERS, formula
from benchmarks.memory_worker import covered, saved_activations, span

TINY = "layers=1,hidden=32,heads=2,sequence=8,vocabulary=64"


def test_the_formulas_are_the_papers_for_four_bytes_and_adams_two_averages() -> None:
    # 1000 elements on 4 ranks: 4, 4 and 8 bytes each, a quarter of what the stage cuts.
    assert formula("stage 0", 1000, 4) == {"parameters": 4000, "states": 8000, "gradients": 4000}
    assert formula("stage 1", 1000, 4) == {"parameters": 4000, "states": 2000, "gradients": 4000}
    assert formula("stage 2", 1000, 4)["states"] == 2000
    assert formula("stage 2", 1000, 4)["gradients"] == 1000


def test_a_byte_is_counted_once_whoever_looks_at_it() -> None:
    flat = torch.zeros(10)
    assert covered([span(flat), span(flat[2:5]), span(flat[4:])]) == 40
    assert covered([span(flat[1:3]), span(flat[7:8])]) == 12
    assert covered([span(torch.zeros(4, 3)[:, 0])]) == (3 * 3 + 1) * 4
    assert covered([span(torch.zeros(0)), span(torch.zeros(()))]) == 4


def test_activations_are_what_autograd_keeps_without_parameters_at_its_most() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
    with saved_activations(model) as most:
        for _ in range(2):  # the second backward's do not come on top of the first's
            x = torch.ones(2, 4)
            model(x).sum().backward()
            gc.collect()
    # The input (2, 4), both results of tanh (2, 5) and (2, 3); the weights are parameters.
    assert most() == (8 + 10 + 6) * 4


def test_a_run_measures_states_as_the_formula_says_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["--ranks", "2", "--model", TINY, "--limit", "100", *files]) == 0
    printed = capsys.readouterr().out
    assert "Memory of one rank, MiB" in printed
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [each["kind"] for each in rows] == list(KINDS)
    for each in rows:
        measured, said = each["measured"], each["formula"]
        assert measured["states"] == pytest.approx(said["states"], rel=0.03)
        assert measured["parameters"] == pytest.approx(said["parameters"], rel=0.03)
        assert set(measured) == set(OWNERS)
        assert all(set(rank) == set(OWNERS) for rank in each["every"])
        assert len(each["every"]) == 2
        assert measured["activations"] > 0
    assert rows[2]["measured"]["gradients"] == pytest.approx(rows[2]["formula"]["gradients"], rel=0.03)
    assert rows[1]["measured"]["states"] < 0.6 * rows[0]["measured"]["states"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_options_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "hidden=7"]) == 2
    assert main(["--plot", "a.jpg"]) == 2
    assert "pictures are PNG" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ranks", "0,2"])
