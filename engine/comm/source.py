"""Which line of the user's program a thread is in."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = (str(Path(__file__).parent.parent) + os.sep, torch.__path__[0] + os.sep, os.path.dirname(os.__file__))


def source_line(frame: FrameType | None) -> str:
    """Return file:line of the innermost caller outside the engine, torch and Python's own library and packages; of
    `frame` itself where there is none.
    """
    first = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        frame = frame.f_back
    found = frame or first
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found is not None else "an unknown line"
