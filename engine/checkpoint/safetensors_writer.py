"""Weights onto the disk, file by file, so that whoever reads the folder finds the old ones or the new ones.

Readers take `model.safetensors` where it is there, else the parts that the index names. So one step makes the new
weights count: the rename of the new `model.safetensors`; or of the new index, or, where a `model.safetensors` hides
that index, the removal of the latter. Before this step every new file is whole on the disk, under a name that no old
one has; after it old files are removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from engine.checkpoint.safetensors_format import FILE, INDEX, Entry, header_bytes, part_names, size_of, write_values

_OURS = re.compile(r"model((-\d+)?-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_PARTIAL = ".partial"


class Writer:
    """Writes the files one after another. After a fault it takes what comes and writes nothing, so that no rank waits
    for it. A fault means that the new weights do not count.
    """

    def __init__(self, folder: str | os.PathLike[str], files: Sequence[Sequence[Entry]]) -> None:
        self.fault = ""
        self._files = files
        self._file: BinaryIO | None = None
        self._names: list[str] = []
        self._made: list[Path] = []  # what is to be taken back after a fault
        try:
            self._folder = Path(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._look()
        except (OSError, TypeError, ValueError) as error:  # ValueError: no path at all
            self.fault = f"{folder}: {error}"

    def begin(self, number: int) -> None:
        self._try(lambda: self._begin(number))

    def add(self, whole: Tensor) -> None:
        self._try(lambda: write_values(self._open, whole))

    def finish(self) -> None:
        self._try(self._finish)
        if self.fault:
            self._take_back()
        else:
            self._remove_old()

    def _try(self, call: Callable[[], None]) -> None:
        if self.fault:
            return
        try:
            call()
        except (OSError, ValueError) as error:
            self.fault = f"{self._folder}: {error}"

    def _look(self) -> None:
        """Choose the names, and clear away what a killed save left half written."""
        for name in (FILE, INDEX):
            if (self._folder / name).is_dir():
                self.fault = f"{self._folder / name} is a folder, where a file has to go: remove it"
                return
        self._indexed = _names_in(self._folder / INDEX)
        there = os.listdir(self._folder)
        self._names = part_names(len(self._files), {*there, *self._indexed})
        for name in there:
            if name.endswith(_PARTIAL) and _OURS.fullmatch(name.removesuffix(_PARTIAL)):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()

    @property
    def _open(self) -> BinaryIO:
        assert self._file is not None
        return self._file

    def _create(self, name: str) -> BinaryIO:
        path = self._folder / f"{name}{_PARTIAL}"
        file = path.open("wb")
        self._made.append(path)
        return file

    def _begin(self, number: int) -> None:
        self._close()
        self._file = self._create(self._names[number])
        self._open.write(header_bytes(self._files[number]))

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        self._close()
        if len(self._names) > 1:
            places = {entry[0]: name for name, file in zip(self._names, self._files, strict=True) for entry in file}
            total = sum(size_of(entry) for file in self._files for entry in file)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            self._file = self._create(INDEX)
            self._open.write((json.dumps(index, indent=2) + "\n").encode())
            self._close()
            for name in self._names:
                self._rename(name)
            self._sync()
            self._rename(INDEX)
            if (self._folder / FILE).exists():
                self._sync()
                (self._folder / FILE).unlink(missing_ok=True)
        else:
            self._rename(FILE)

    def _rename(self, name: str) -> None:
        (self._folder / f"{name}{_PARTIAL}").replace(self._folder / name)
        self._made.append(self._folder / name)

    def _sync(self) -> None:
        """Make the names in the folder last; not every file system can."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(folder)

    def _take_back(self) -> None:
        """Remove what was made, the index first. What stays all the same is cleared away by the next save."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.unlink()

    def _remove_old(self) -> None:
        """Remove what no longer counts, the index last, as it names the rest. What cannot be removed stays."""
        keep = {*self._names, INDEX} if len(self._names) > 1 else {FILE}
        with contextlib.suppress(OSError):
            self._sync()
            old = {name for name in os.listdir(self._folder) if _OURS.fullmatch(name)} | self._indexed
            for name in sorted(old - keep, key=lambda name: (name == INDEX, name)):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink()


def _names_in(index: Path) -> set[str]:
    """Return the files of its folder that an index names; of a damaged one, none."""
    try:
        found = set(json.loads(index.read_bytes())["weight_map"].values())
        return {name for name in found if name.endswith(".safetensors") and "/" not in name and "\0" not in name}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
