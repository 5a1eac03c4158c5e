"""Plants one bug at a time in a copy of the repository and reports which tests fall: `python -m tests.planted_bugs`.

Not a test. It shows that the suite catches the mistakes that break such engines; CONTRIBUTING has its table. Each bug
is one replaced line; a line that is no longer there is an error, so the list cannot rot unseen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    line: str
    wrong: str
    tests: tuple[str, ...] = ("tests/test_parity.py",)
    """Where to look; the parity grid must catch those of the training step."""
    transport: str = "shm"
    """On which the tests run, where they do not name one."""


BUGS = (
    Bug(
        "row bias added on every tensor rank",
        "engine/tensor_parallel/linear.py",
        "y = F.linear(x, self.matrix(), bias if comm.size == 1 else None)",
        "y = F.linear(x, self.matrix(), bias)",
    ),
    Bug(
        "vocab loss without the other ranks' sum",
        "engine/tensor_parallel/loss.py",
        "total, log_total, share = reduced[0], reduced[0].log(), self.label_smoothing",
        "log_total, share = total.log(), self.label_smoothing",
    ),
    Bug(
        "vocab loss gradient without the target",
        "engine/tensor_parallel/loss.py",
        "hit = scale.masked_fill(at.elsewhere, 0.0) * (self.label_smoothing - 1.0)",
        "hit = scale * (self.label_smoothing - 1.0)",
    ),
    Bug(
        "mean over microbatches instead of the count",
        "engine/train_step.py",
        "return total if self.scaler is None else",
        "return total / count * 7 if self.scaler is None else",
    ),
    Bug(
        "gradients divided by the local count",
        "engine/train_step.py",
        "total, count = self.mesh.world.all_reduce(sums)",
        "total, count = self.mesh.pipeline.all_reduce(sums)",
    ),
    Bug(
        "replicated parameters counted on every tensor rank",
        "engine/placement.py",
        "return ((0, numel),) if rank == 0 else ()",
        "return ((0, numel),)",
    ),
    Bug(
        "tied copies counted on every stage",
        "engine/zero/adding.py",
        "counts = tie is None or tie.stages[0] == mesh.pipeline.rank",
        "counts = True",
    ),
    Bug("clip factor without an upper bound", "engine/zero/norm.py", ".clamp(max=1.0)", "", ("tests/test_zero.py",)),
    Bug(
        "tied gradients not summed over the stages",
        "engine/zero/ties.py",
        'share(tie, local[tie.name], mesh.pipeline, "sum")',
        "pass",
    ),
    Bug(
        "bucket order that differs between ranks",
        "engine/zero/reducer.py",
        "key=lambda number: -firsts[number])",
        "key=lambda number: firsts[number] * (1 if self._buckets[0].comm.rank else -1))",
    ),
    Bug(
        "shards gathered from the wrong place",
        "engine/zero/buckets.py",
        "self.comm.all_gather(self.shard, out=self.flat)\n",
        "self.comm.all_gather(self.flat[: self.plan.shard], out=self.flat)\n",
    ),
    Bug(
        "a module that does not wait for its gather",
        "engine/zero/stepping.py",
        "alive.wait(buckets)",
        "pass",
        ("tests/test_zero_overlap.py",),
    ),
    Bug(
        "gradients divided twice",
        "engine/zero/optimizer.py",
        "bucket.reduced.div_(scale)",
        "bucket.reduced.div_(scale).div_(divisor)",
    ),
    Bug(
        "padding and copies counted in the norm",
        "engine/zero/optimizer.py",
        "for start, stop in bucket.plan.counted(bucket.start, bucket.stop, self._infos):",
        "for start, stop in [(bucket.start, bucket.stop)]:",
    ),
    Bug(
        "only the last microbatch's shard kept",
        "engine/zero/buckets.py",
        "total.add_(out)",
        "total.copy_(out)",
    ),
    Bug(
        "gradients lost that come after their bucket has started",
        "engine/zero/reducer.py",
        "if more[number]:",
        "if False:",
        ("tests/test_zero_accumulate.py",),
    ),
    Bug(
        "unused parameters stepped",
        "engine/zero/optimizer.py",
        "self._inner.leave_out(unused)",
        "pass",
        ("tests/test_zero_edges.py",),
    ),
    Bug(
        "sums of low precision in low precision",
        "engine/precision.py",
        "return torch.float32 if dtype in LOW else dtype",
        "return dtype",
        ("tests/test_zero_precision.py",),
    ),
    Bug(
        "masters left as they were by a load",
        "engine/zero/buckets.py",
        "if self._masters is not None:\n            own = self.flat",
        "if False:\n            own = self.flat",
        ("tests/test_zero_precision.py",),
    ),
    Bug(
        "input gradient of a column-parallel layer not summed",
        "engine/tensor_parallel/product.py",
        "_launch(comm, comm.all_reduce, grad_x)",
        "(lambda: grad_x)",
    ),
    Bug(
        "gradients of norms under sequence parallel left as each rank's part",
        "engine/placement.py",
        'return [(gradient, 0, 1)] if self.gradient == "sum" else []',
        "return []",
    ),
    Bug(
        "shared heads counted by every rank that holds them",
        "engine/placement.py",
        "if rank % (size // part.slices(size)) == 0:",
        "if True:",
        ("tests/test_tensor_linear.py",),
    ),
    Bug(
        "padding of the vocabulary looked at by the loss",
        "engine/tensor_parallel/loss.py",
        "return x if self.real == self.columns else x.narrow(-1, 0, self.real)",
        "return x",
        ("tests/test_vocabulary_loss.py",),
    ),
    Bug(
        "dropout that does not know which rows it has",
        "engine/train_step.py",
        "start = first + action.microbatch * each",
        "start = action.microbatch * each",
        ("tests/test_tensor_random.py",),
    ),
    Bug(
        "a microbatch's gradient sent for another",
        "engine/pipeline/executor.py",
        "source = self.inputs.pop(key)",
        "source = self.inputs.pop(max(self.inputs))",
    ),
    Bug(
        "layers seeded by their place in the stage",
        "engine/pipeline/layers.py",
        'stream_seed("layer", seed, index)',
        'stream_seed("layer", seed)',
        ("tests/test_pipeline_model.py",),
    ),
    Bug(
        "strided tensors handed to the backend as they are",
        "engine/comm/arguments.py",
        "if x.is_contiguous() and not x.is_conj() and not x.is_neg():",
        "if True:",
        ("tests/test_communicator_memory.py",),
    ),
    Bug(
        "ranks of the world where ranks of the group are meant",
        "engine/comm/transport.py",
        "return sending + [group.recv([_bytes(x)], peer, tag)",
        "return sending + [group.recv([_bytes(x)], self.ranks[peer], tag)",
        ("tests/test_communicator.py",),
        "torch",
    ),
    Bug(
        "ring sums the block before",
        "engine/comm/algorithms/flat.py",
        "[(before, at(k + 2))], reduce=True)",
        "[(before, at(k + 1))], reduce=True)",
        ("tests/test_algorithms.py",),
    ),
    Bug(
        "one range of tags for all communicators",
        "engine/comm/algorithms/run.py",
        "self._base = space << 20",
        "self._base = 0",
        ("tests/test_comm_apart.py",),
    ),
    Bug(
        "fp16 messages without their scale",
        "engine/comm/algorithms/compress.py",
        "return narrow.to(torch.float32) * scales.repeat_interleave(CHUNK)[:count]",
        "return narrow.to(torch.float32)",
        ("tests/test_comm_compress.py",),
    ),
    Bug(
        "shared slots written while the others read them",
        "engine/comm/shm/collectives.py",
        "self._turn ^= 1",
        "self._turn ^= 0",
        ("tests/test_shm_values.py",),
    ),
    Bug(
        "a broadcast's slot written while others read it",
        "engine/comm/shm/collectives.py",
        "self._told_turns[src] ^= 1",
        "self._told_turns[src] ^= 0",
        ("tests/test_shm_values.py",),
    ),
    Bug(
        "a vector reduced into before it is sent",
        "engine/comm/algorithms/run.py",
        "            wait(works[sends:])\n            wait(works[:sends])\n",
        "            wait(works[sends:])\n",
        ("tests/test_algorithms.py",),
    ),
    Bug(
        "a receive posted early over what another rank is sent",
        "engine/comm/algorithms/plan.py",
        "_overlap(new, old) and new.peer != old.peer",
        "False",
        ("tests/test_algorithms.py",),
    ),
    Bug(
        "the slope of a rank's exponentials for its shares",
        "engine/tensor_parallel/loss.py",
        "slope = parts[0] / total",
        "slope = scale / total",
        ("tests/test_vocabulary_loss.py",),
    ),
    Bug(
        "shared sums of low precision rounded at every step",
        "engine/comm/shm/collectives.py",
        'wide = out.dtype in LOW and op in ("sum", "prod")',
        "wide = False",
        ("tests/test_shm_values.py",),
    ),
    Bug(
        "no meeting after sums are read where they lie",
        "engine/comm/shm/collectives.py",
        "            v[first:last].copy_(self._peer(j, v, first, last - first))\n        self._meet(head)",
        "            v[first:last].copy_(self._peer(j, v, first, last - first))",
        ("tests/test_shm_registered.py", "tests/test_shm_stress.py"),
    ),
)


def main() -> None:
    """Try all bugs, or those whose names hold the words on the command line; exit 1 when one survives."""
    chosen = [bug for bug in BUGS if not sys.argv[1:] or any(word in bug.name for word in sys.argv[1:])]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        for bug in chosen:
            fallen = try_one(bug, copy)
            print(f"{bug.name}: {fallen if fallen else 'SURVIVED'}", flush=True)  # noqa: T201 (a program)
            survived += [] if fallen else [bug.name]
    sys.exit(f"{len(survived)} survived: {survived}" if survived else 0)


def try_one(bug: Bug, copy: Path) -> str:
    """Return which tests fall with `bug`, an empty string for none."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "*_cache", ".hypothesis"))
    path = copy / bug.file
    text = path.read_text()
    if text.count(bug.line) != 1:
        sys.exit(f"{bug.name}: {bug.file} holds the line {text.count(bug.line)} times, not once: {bug.line!r}")
    path.write_text(text.replace(bug.line, bug.wrong))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *bug.tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "ENGINE_TRANSPORT": bug.transport},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    fallen = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return ", ".join(fallen)


if __name__ == "__main__":
    main()
