"""The layout of a safetensors file: its header, read and written. No tensor is held here.

Format: https://github.com/huggingface/safetensors#format. The library reads slices; it writes only what is in memory
as a whole, so files are written here.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.errors import DtypeError, UsageError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Entry = tuple[str, tuple[int, ...], torch.dtype]
Header = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_METADATA = "__metadata__"
_LONGEST = 100_000_000  # bytes of a header, as the library has it
_TOO_MANY = 2**60  # elements or bytes, so that none of the sums here is too large for torch
_Place = tuple[tuple[int, ...], str, int, int]
"""Shape, dtype code, and where the values start and stop."""


def part_names(parts: int, taken: Collection[str] = ()) -> list[str]:
    """Return the names for a model in so many files. Parts get names of which none is `taken`: those that Hugging Face
    gives, else with a number after `model`, which its code reads, and removes with old parts, as well.
    """
    if parts == 1:
        return [FILE]
    for save in itertools.count(1):
        start = "model" if save == 1 else f"model-{save}"
        names = [f"{start}-{number:05d}-of-{parts:05d}.safetensors" for number in range(1, parts + 1)]
        if not set(names) & set(taken):
            return names
    raise AssertionError("unreachable")


def size_of(entry: Entry) -> int:
    """Return the bytes of a tensor's values."""
    return math.prod(entry[1]) * entry[2].itemsize


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise DtypeError for a dtype that the format has no name for, UsageError for a name that it keeps for itself."""
    for name, _, dtype in entries:
        if name == _METADATA:
            raise UsageError(f"{name} names a parameter or buffer, and safetensors files keep it for notes: rename it")
        if dtype not in _CODES:
            known = ", ".join(str(each).removeprefix("torch.") for each in _CODES)
            raise DtypeError(f"{name} is {dtype}, which safetensors files do not hold: convert it to one of {known}")


def divide_into_files(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Return the entries in their order, file by file, of at most `limit` bytes each unless one tensor alone is larger.
    In a file the widest dtypes come first, so that each tensor is aligned.
    """
    files: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if files[-1] and used + size_of(entry) > limit:
            files.append([])
            used = 0
        files[-1].append(entry)
        used += size_of(entry)
    return [sorted(file, key=lambda entry: -entry[2].itemsize) for file in files]


def header_bytes(entries: Sequence[Entry]) -> bytes:
    """Return what stands before the values of `entries`, which follow in this order."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    start = 0
    for entry in entries:
        name, shape, dtype = entry
        stop = start + size_of(entry)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    return len(text).to_bytes(8, "little") + text


def write_values(file: BinaryIO, value: Tensor) -> None:
    """Append a tensor's values."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy().data)


def read_header(path: Path) -> Header:
    """Return shape and dtype of every tensor of a file by name. Raises UsageError for a damaged file, whatever in its
    header or its length shows it, and for a dtype that torch has no name for; OSError for one that cannot be read.
    """
    with path.open("rb") as file:
        there = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST, there):
            raise UsageError(f"{path} is no safetensors file: its first 8 bytes give a header of {length} bytes")
        text = file.read(length)
    try:
        found = json.loads(text.decode())
        _check_notes(found.pop(_METADATA, None))
        places = {name: _place(each) for name, each in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(f"{path} is no safetensors file: its header is damaged ({error!r})") from error
    for name, (_, code, _, _) in places.items():
        if code not in _DTYPES:
            raise UsageError(f"{path}: {name} is {code}, which is none of {', '.join(_DTYPES)}")
    _check_spans(path, places, there - length)
    return {name: (shape, _DTYPES[code]) for name, (shape, code, _, _) in places.items()}


def _check_notes(notes: Any) -> None:
    if notes is not None and not all(isinstance(each, str) for each in notes.values()):
        raise TypeError(f"{_METADATA} holds more than text")


def _place(each: Any) -> _Place:
    shape, offsets, code = each["shape"], each["data_offsets"], each["dtype"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or not isinstance(code, str):
        raise TypeError("shape and data_offsets are lists, dtype is text")
    for number in (*shape, *offsets):
        if type(number) is not int or not 0 <= number < _TOO_MANY:
            raise ValueError(f"{number} is no size")
    start, stop = offsets
    return tuple(shape), code, start, stop


def _check_spans(path: Path, places: Mapping[str, _Place], there: int) -> None:
    """Raise UsageError unless the values fill the `there` bytes after the header, one tensor after the other."""
    end = 0
    for name, (shape, code, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        size = size_of((name, shape, _DTYPES[code]))
        if stop - start != size or math.prod(max(length, 1) for length in shape) >= _TOO_MANY:
            raise UsageError(
                f"{path} is damaged: {name}, {code} of shape {shape}, takes {size} bytes, its data_offsets "
                f"[{start}, {stop}] span {stop - start}: write the file anew"
            )
        if start != end:
            raise UsageError(
                f"{path} is damaged: {name} starts at byte {start} of the values, where those before it end at {end}: "
                f"{'they overlap' if start < end else 'there is a gap'}: write the file anew"
            )
        end = stop
    if end != there:
        how = "is cut off" if end > there else "has bytes after its end"
        raise UsageError(f"{path} {how}: its header promises {end} bytes of values, there are {there}: copy it again")
