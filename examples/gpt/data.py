"""Text files as bytes: a training part, a held-out part, and the windows of each step.

A window is `sequence + 1` bytes: the first `sequence` are inputs, the last `sequence` the bytes to predict. Which
windows a step sees depends on (seed, step) alone, so every layout trains on the same global batch.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.device import stream_seed
from examples.gpt.config import UserError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Text:
    """Bytes to learn from. `train` and `validation` do not overlap; uint8, one dim."""

    source: str
    """Where it was read."""
    train: Tensor
    """The first part."""
    validation: Tensor
    """The last part, never trained on."""
    files: int
    """Files that it was read from."""
    skipped: int
    """Files of the folder that are no UTF-8 text or could not be read."""
    digest: str
    """SHA-256 of all bytes, to compare ranks by."""

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped that are not readable UTF-8" if self.skipped else ""
        total = len(self.train) + len(self.validation)
        return (
            f"{self.source}: {self.files} files{skipped}, {total:,} bytes, the last {len(self.validation):,} held out"
        )


def read_text(data: str | None, validation_fraction: float, sequence: int) -> Text:
    """Read the file or folder `data` (None: the standard library's source) and split it.

    Raises UserError for a path without readable text, or a text too short for one window in each part.
    """
    source = "Python's standard library" if data is None else data
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [path for path in root.rglob("*.py") if not _NOT_LIBRARY & set(path.relative_to(root).parts)]
        contents, skipped = _read_folder(sorted(paths), source)
    elif Path(data).is_dir():
        contents, skipped = _read_folder(_visible_files(Path(data)), source)
    else:
        contents, skipped = [_read_file(Path(data))], 0
    content = b"\n".join(contents)
    train, validation = split(content, validation_fraction, sequence, source)
    digest = hashlib.sha256(content).hexdigest()
    return Text(source, train, validation, files=len(contents), skipped=skipped, digest=digest)


def split(content: bytes, validation_fraction: float, sequence: int, source: str) -> tuple[Tensor, Tensor]:
    """Return the training part and the held-out part, which is the last `validation_fraction`, but at least one window.

    Raises UserError when the bytes are too few for one window in each.
    """
    window = sequence + 1
    if len(content) < 2 * window:
        shorter = len(content) // 2 - 1
        fix = f"give more text, or lower model.sequence to {shorter}" if shorter > 0 else "give more text"
        raise UserError(
            f"{source} has {len(content)} bytes, but one training and one validation window of model.sequence="
            f"{sequence} need 2 x {window} = {2 * window}: {fix}"
        )
    everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    held_out = min(max(int(len(content) * validation_fraction), window), len(content) - window)
    return everything[:-held_out], everything[-held_out:]


def training_windows(train: Tensor, sequence: int, batch: int, seed: int, step: int) -> Tensor:
    """Return the windows (batch, sequence + 1) of the global batch of `step`, drawn with replacement."""
    generator = torch.Generator().manual_seed(stream_seed("windows", seed, step))
    starts = torch.randint(len(train) - sequence, (batch,), generator=generator)
    return _windows(train, starts, sequence)


def validation_windows(validation: Tensor, sequence: int, rows: int) -> Tensor:
    """Return at most `rows` windows (rows, sequence + 1) that do not overlap, spread evenly over the held-out part."""
    rows = min(rows, len(validation) // (sequence + 1))
    starts = torch.arange(rows) * (len(validation) // rows)
    return _windows(validation, starts, sequence)


def own_rows(windows: Tensor, data_rank: int, data_size: int) -> tuple[Tensor, Tensor]:
    """Return this data rank's inputs and targets, (rows, sequence) each. Without a remainder all have as many rows."""
    own = windows.tensor_split(data_size)[data_rank]
    return own[:, :-1], own[:, 1:]


def _windows(text: Tensor, starts: Tensor, sequence: int) -> Tensor:
    return text[starts[:, None] + torch.arange(sequence + 1)].long()


def _visible_files(folder: Path) -> list[Path]:
    """Return all files below `folder` in order, but those in or named as hidden ones, such as .git."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _read_folder(paths: list[Path], source: str) -> tuple[list[bytes], int]:
    found = [_text_or_none(path) for path in paths]
    contents = [content for content in found if content is not None]
    if not any(contents):
        raise UserError(
            f"{source}: none of its {len(paths)} files holds readable UTF-8 text: give a folder with text files"
        )
    return contents, len(paths) - len(contents)


def _text_or_none(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if b"\0" in content else content


def _read_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"--data {path} does not exist: give a text file, or a folder of text files") from error
    except OSError as error:
        raise UserError(f"--data {path} cannot be read: {error.strerror}: give a readable text file") from error
    if not content:
        raise UserError(f"--data {path} is empty (0 bytes): give a file with text")
    return content
