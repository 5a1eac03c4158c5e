"""The examples as a user runs them: real command lines over real processes, and what a user sees of each mistake.

Every job has a deadline, and after it no process of it may be left: they are found by a mark in their environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.gpt import data
from examples.gpt.config import BYTES, TrainConfig, UserError, check_batch, read_config
from examples.gpt.train import learning_rate_factor, main

ROOT = Path(__file__).parents[1]
TRAIN = ("-m", "examples.gpt.train")
CONFIG = ("--config", str(ROOT / "examples/gpt/config.yaml"))
SMALL = (
    *("--steps=20", "--batch=16", "--microbatches=2", "--sample_bytes=12", "--evaluate_every=10"),
    *("--model.layers=2", "--model.hidden=32", "--model.heads=4", "--model.sequence=32", "--optimizer.warmup_steps=5"),
    "--optimizer.learning_rate=1e-2",
)
ALONE = ("--layout.data=1", "--layout.pipeline=1", "--layout.tensor=1")
TENSOR_2 = ("--layout.data=1", "--layout.pipeline=1", "--layout.tensor=2")
SUMMARY = {
    *("layout", "world_size", "parameters", "steps", "loss_first", "loss_last", "valid_loss"),
    *("tokens_per_second", "seconds", "peak_memory_mib", "comm_bytes_per_step"),
}


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error")]

    @property
    def root_cause(self) -> str:
        """The part of torchrun's summary about the rank that failed first."""
        return self.output.partition("Root Cause")[2]


class Job:
    """A torchrun of `ranks` processes, with its output in a file."""

    def __init__(self, folder: Path, ranks: int, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.path = folder / f"output-{self.mark}.txt"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JOB_OF_TEST": self.mark}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with self.path.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def end(self, deadline: float) -> Outcome:
        """Wait for the job to end by itself, and check that nothing of it is left; clean up in any case."""
        try:
            code = self.process.wait(deadline)
            wait_until(lambda: not self.living(), 30, "every process of the job has ended")
            return Outcome(code, self.path.read_text())
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline} s:\n{self.path.read_text()}") from None
        finally:
            for pid in self.living():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def living(self) -> list[int]:
        """Return the processes with this job's mark that are not zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"JOB_OF_TEST={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


def wait_until(condition: Callable[[], object], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(400)))
    return str(path)


def launch(tmp_path: Path, ranks: int, *arguments: str, deadline: float = 120) -> Outcome:
    return Job(tmp_path, ranks, *arguments).end(deadline)


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- what works ----------------------------------------------------------------------------------------------------


def test_training_over_eight_ranks(tmp_path: Path, text: str) -> None:
    """The real command line, everything it leaves behind, and that one process alone computes the same."""
    out = tmp_path / "runs"
    options = (*CONFIG, *SMALL, "--data", text, "--out", str(out))
    done = launch(tmp_path, 8, *TRAIN, *options, deadline=150)
    assert done.code == 0, done.output
    run = out / "latest"
    assert run.is_symlink()

    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == SUMMARY
    assert summary["layout"] == {"data": 2, "pipeline": 2, "tensor": 2}
    assert summary["world_size"] == 8
    assert summary["steps"] == 20
    assert 5.0 < summary["loss_first"] < 6.0
    assert 0.0 < summary["loss_last"] < summary["loss_first"] - 1.0
    assert 0.0 < summary["valid_loss"] < summary["loss_first"] - 1.0
    assert summary["tokens_per_second"] > 0
    assert 0 < summary["seconds"] < 150
    assert 50 < summary["peak_memory_mib"] < 5000
    assert {axis: count > 0 for axis, count in summary["comm_bytes_per_step"].items()} == dict.fromkeys(
        ("data", "pipeline", "tensor", "world"), True
    )

    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert all(set(line) >= {"step", "loss", "grad_norm", "lr", "tokens_per_second"} for line in metrics)
    assert [line["step"] for line in metrics if "valid_loss" in line] == [10, 20]
    assert metrics[0]["loss"] == summary["loss_first"]
    assert metrics[-1]["valid_loss"] == summary["valid_loss"]

    picture = (run / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 10_000
    logs = [(run / "logs" / f"rank{rank}.log").read_text() for rank in range(8)]
    assert all("process " in log and "step=20" in log for log in logs)
    samples = (run / "sample.txt").read_text().split("\n----\n")
    assert len(samples) == TrainConfig().sample_rows
    assert all(sample.startswith("def ") for sample in samples)
    weights = torch.load(run / "model.pt", weights_only=True)
    tied = weights["5.project.weight"]
    assert torch.equal(weights["0.token.weight"], tied)
    assert sum(w.numel() for w in weights.values()) - tied.numel() == summary["parameters"]

    assert "Training finished" in done.output
    assert "validation loss" in done.output
    assert "\x1b" not in done.output, "no control characters where the output is no terminal"

    main([*options, *ALONE, "--name", "alone"])
    alone = metrics_of(out / "alone")
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in alone] == pytest.approx([line[key] for line in metrics], rel=1e-3)
    assert (out / "latest").resolve() == (out / "alone").resolve()


def test_minimal_over_four_ranks(tmp_path: Path) -> None:
    done = launch(tmp_path, 4, "examples/minimal.py")
    assert done.code == 0, done.output
    losses = [float(line.split()[-1]) for line in done.output.splitlines() if line.startswith("step")]
    assert len(losses) == 11, "rank 0 alone prints"
    assert losses[-1] < 0.1 < 1.0 < losses[0]


def test_config_file_has_the_defaults() -> None:
    assert read_config(CONFIG) == TrainConfig()
    assert read_config([*CONFIG, "--model.layers=2"]).model.layers == 2


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read_config(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("--layout.tensor", "Ranks that share the matrices", "--optimizer.zero_stage", "gradients too"):
        assert words in shown


def test_learning_rate() -> None:
    config = TrainConfig(steps=100).optimizer
    factors = [learning_rate_factor(config, 100, step) for step in range(100)]
    assert max(factors) == factors[config.warmup_steps] == 1.0
    assert factors[: config.warmup_steps] == sorted(factors[: config.warmup_steps])
    assert factors[config.warmup_steps :] == sorted(factors[config.warmup_steps :], reverse=True)
    assert factors[-1] == pytest.approx(config.final_fraction)


# ---- data ----------------------------------------------------------------------------------------------------------


def test_split_holds_out_the_end() -> None:
    content = bytes(i % 251 for i in range(1000))
    train, validation = data.split(content, 0.1, 16, "text")
    assert bytes(train.tolist()) + bytes(validation.tolist()) == content
    assert len(validation) == 100
    train, validation = data.split(content[:34], 0.1, 16, "text")
    assert (len(train), len(validation)) == (17, 17), "each part has at least one window"


def test_training_never_sees_the_held_out_text() -> None:
    train, validation = data.split(b"\0" * 400 + b"\1" * 100, 0.2, 16, "text")
    for step in range(50):
        assert not data.training_windows(train, 16, 8, 0, step).any()
    assert data.validation_windows(validation, 16, 4).all()


def test_windows_reach_every_byte_and_validation_windows_do_not_overlap() -> None:
    text = torch.arange(20, dtype=torch.uint8)
    drawn = data.training_windows(text, 16, 200, 0, 1)
    assert drawn.shape == (200, 17)
    assert set(drawn.flatten().tolist()) == set(range(20))
    even = data.validation_windows(torch.arange(100, dtype=torch.uint8), 9, 64)
    assert even.shape == (10, 10), "as many as fit"
    assert even.flatten().unique().numel() == 100


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_windows_are_the_same_on_every_layout(ranks: int) -> None:
    text = torch.randint(BYTES, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    windows = data.training_windows(text, 16, 8, 3, 7)
    parts = [data.own_rows(windows, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), windows[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in parts]), windows[:, 1:])
    assert not torch.equal(windows, data.training_windows(text, 16, 8, 3, 8))
    assert not torch.equal(windows, data.training_windows(text, 16, 8, 4, 7))


def test_a_folder_is_read_in_order_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in (
        ("b.txt", b"second " * 20), ("a.txt", b"first " * 20), ("sub/c.txt", b"third " * 20),
        ("picture.png", b"\x89PNG\xff\xfe"), (".git/config", b"hidden"), ("empty.txt", b""),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    text = data.read_text(str(tmp_path), 0.1, 16)
    everything = bytes(torch.cat([text.train, text.validation]).tolist())
    assert everything == b"first " * 20 + b"\n" + b"second " * 20 + b"\n\n" + b"third " * 20
    assert (text.files, text.skipped) == (4, 1)
    assert text.digest == data.read_text(str(tmp_path), 0.1, 16).digest


def test_default_text_is_the_standard_library() -> None:
    text = data.read_text(None, 0.1, 128)
    assert len(text.train) > 1_000_000
    assert b"def " in bytes(text.validation[:100_000].tolist())


# ---- mistakes, in one process --------------------------------------------------------------------------------------


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `main`, which must end with exit code 2 and one line; return the line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.layer=3"], ["--model.layer", "did you mean 'model.layers'?"]),
        (["--steps=many"], ["steps", "int", "many"]),
        (["--steps=0"], ["steps=0", "at least 1"]),
        (["--config=/nowhere.yaml"], ["/nowhere.yaml", "not exist"]),
        (["--layout.tensor=0"], ["tensor=0", "at least 1"]),
        (["--model.heads=4", "--layout.tensor=3"], ["model.heads=4", "tensor(3)", "multiple of 3"]),
        (["--model.heads=3"], ["hidden=128", "heads=3"]),
        (["--model.sequence=65", "--model.sequence_parallel=true"], ["sequence=65", "tensor(2)", "use 66"]),
        (["--model.vocabulary=100"], ["vocabulary=100", "256"]),
        (["--name=a/b"], ["name='a/b'"]),
        ([], ["needs 8 processes", "torchrun --standalone --nproc-per-node 8 -m examples.gpt.train"]),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    line = fails(capsys, *arguments)
    for each in words:
        assert each in line


def test_unknown_key_in_the_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optimizer:\n  learning_rat: 1\n")
    assert "did you mean 'learning_rate'?" in fails(capsys, f"--config={tmp_path / 'config.yaml'}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist"]),
        (b"", ["empty", "0 bytes"]),
        (b"x" * 100, ["100 bytes", "2 x 65 = 130", "model.sequence to 49"]),
    ],
)
def test_wrong_data_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    line = fails(capsys, *ALONE, f"--data={path}", f"--out={tmp_path / 'runs'}")
    for each in (str(path), *words):
        assert each in line
    assert not (tmp_path / "runs").exists()


def test_unreadable_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Reading its first byte fails for every user, root too.
    assert "cannot be read: Input/output error" in fails(capsys, *ALONE, "--data=/proc/self/mem")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    assert "none of its 1 files holds readable UTF-8 text" in fails(capsys, *ALONE, f"--data={tmp_path}")


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"batch=30 .* data\(2\) x microbatches\(4\) = 8 .* use batch=32"):
        check_batch(TrainConfig(batch=30, microbatches=4), 2)
    check_batch(TrainConfig(batch=32, microbatches=4), 2)


def test_an_earlier_run_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    options = (*ALONE, *SMALL, "--steps=1", f"--data={text}", f"--out={tmp_path}", "--name=mine")
    main(options)
    before = (tmp_path / "mine" / "summary.json").read_text()
    capsys.readouterr()
    assert "holds an earlier run: choose another --name" in fails(capsys, *options)
    assert (tmp_path / "mine" / "summary.json").read_text() == before


# ---- mistakes and failures of several ranks ------------------------------------------------------------------------

DIFFERENT = """
import os, sys
from examples.gpt.train import main
main([*sys.argv[1:], "--optimizer.weight_decay", "0.1" if os.environ["RANK"] == "0" else "0.2"])
"""

RAISING = """
import os, sys, engine
from examples.gpt import train
plain, calls = train.next_token_loss, 0
def broken(comm, vocabulary):
    loss = plain(comm, vocabulary)
    def wrapped(output, target):
        global calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == 4:
            raise {kind}("this rank broke")
        return loss(output, target)
    return wrapped
train.next_token_loss = broken
train.main(sys.argv[1:])
"""


def test_one_wrong_option_is_one_error(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, *TRAIN, *TENSOR_2, "--batch=0")
    assert done.code != 0
    assert done.errors == ["error: batch=0: must be at least 1"]
    assert "batch=0: must be at least 1" in done.root_cause
    assert "exitcode  : 2" in done.root_cause


def test_missing_data_is_one_error(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, *TRAIN, *TENSOR_2, "--data=/nowhere", f"--out={tmp_path}")
    assert done.code != 0
    assert done.errors == ["error: --data /nowhere does not exist: give a text file, or a folder of text files"]
    assert "exitcode  : 2" in done.root_cause


def test_wrong_number_of_processes(tmp_path: Path) -> None:
    done = launch(tmp_path, 2, *TRAIN, *CONFIG)
    assert done.code != 0
    [error] = done.errors
    assert "data(2) x pipeline(2) x tensor(2) = 8 ranks, but 2 were started" in error


def test_ranks_with_different_configurations(tmp_path: Path, text: str) -> None:
    (tmp_path / "different.py").write_text(DIFFERENT)
    done = launch(tmp_path, 2, str(tmp_path / "different.py"), *TENSOR_2, *SMALL, f"--data={text}")
    assert done.code != 0
    [error] = done.errors
    assert "the configuration differs" in error
    assert "weight_decay=0.1" in error
    assert "weight_decay=0.2" in error


@pytest.mark.parametrize("kind", ["RuntimeError", "engine.EngineError"])
def test_one_rank_raises_in_a_step(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "raising.py").write_text(RAISING.format(kind=kind))
    run = ("--name=broken", f"--out={tmp_path}", f"--data={text}")
    done = launch(tmp_path, 2, str(tmp_path / "raising.py"), *TENSOR_2, *SMALL, *run)
    assert done.code != 0
    if kind == "RuntimeError":
        assert done.errors == []
        assert done.output.count("RuntimeError: this rank broke") == 1
    else:
        assert done.errors == ["error on rank 1: this rank broke"]
        assert "this rank broke" in done.root_cause
    assert "rank      : 1 " in done.root_cause
    log = (tmp_path / "broken/logs/rank1.log").read_text()
    assert "Traceback" in log
    assert "this rank broke" in log


def test_a_killed_rank_ends_the_job(tmp_path: Path, text: str) -> None:
    layout = ("--layout.data=2", "--layout.pipeline=2", "--layout.tensor=1")
    job = Job(
        tmp_path, 4, *TRAIN, *layout, *SMALL, "--steps=100000", f"--data={text}", f"--out={tmp_path}", "--name=killed"
    )
    run = tmp_path / "killed"
    metrics = run / "metrics.jsonl"
    try:
        wait_until(
            lambda: job.process.poll() is not None or (metrics.exists() and metrics.stat().st_size), 100, "a step"
        )
        victim = int((run / "logs/rank2.log").read_text().partition("process ")[2].split()[0])
        assert victim in job.living()
        os.kill(victim, signal.SIGKILL)
    finally:
        done = job.end(50)
    assert done.code != 0
    assert "SIGKILL" in done.root_cause
    assert "rank      : 2 " in done.root_cause
