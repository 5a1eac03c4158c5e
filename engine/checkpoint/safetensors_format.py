"""The layout of a safetensors file: its header, read and written. No tensor is held here.

Format: https://github.com/huggingface/safetensors#format. The library reads slices; it writes only what is in memory
as a whole, so files are written here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

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
_LONGEST = 100_000_000  # bytes of a header, as the library has it


def part_name(number: int, parts: int) -> str:
    """Return the name of part `number`, from 0, of a model in so many files."""
    return FILE if parts == 1 else f"model-{number + 1:05d}-of-{parts:05d}.safetensors"


def size_of(entry: Entry) -> int:
    """Return the bytes of a tensor's values."""
    return math.prod(entry[1]) * entry[2].itemsize


def check_dtypes(entries: Sequence[Entry]) -> None:
    """Raise DtypeError for a dtype that the format has no name for."""
    for name, _, dtype in entries:
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
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
    """Return shape and dtype of every tensor of a file by name. Raises UsageError for a damaged file, and for a dtype
    that torch has no name for; OSError for one that cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST, os.fstat(file.fileno()).st_size - 8):
            raise UsageError(f"{path} is no safetensors file: its first 8 bytes give a header of {length} bytes")
        text = file.read(length)
        there = os.fstat(file.fileno()).st_size - 8 - length
    try:
        found = json.loads(text)
        found.pop("__metadata__", None)
        header = {name: (tuple(each["shape"]), each["dtype"]) for name, each in found.items()}
        end = max((each["data_offsets"][1] for each in found.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} is no safetensors file: its header is damaged ({error!r})") from error
    if end != there:
        raise UsageError(f"{path} is cut off: its header promises {end} bytes of values, there are {there}")
    for name, (_, code) in header.items():
        if code not in _DTYPES:
            raise UsageError(f"{path}: {name} is {code}, which is none of {', '.join(_DTYPES)}")
    return {name: (shape, _DTYPES[code]) for name, (shape, code) in header.items()}
