"""What surrounds a run: its folder, the log file of every rank, and the one line that a failed run ends with."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import NoReturn

import engine
from engine.errors import CommunicationError
from examples.gpt.config import TrainConfig, UserError, require


def open_folder(config: TrainConfig, mesh: engine.Mesh) -> Path:
    """Make the run's folder on rank 0, point `latest` to it, and return its path on every rank. Collective.

    Raises UserError on rank 0 when it exists already and holds something, or cannot be made.
    """
    folder = Path()
    if mesh.rank == 0:
        try:
            folder = _new_folder(config)
            _link_latest(folder)
        except OSError as error:
            raise UserError(
                f"out={config.out}: {error.strerror}: {error.filename}: give --out a folder to write in"
            ) from error
        (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    folder = Path(mesh.world.broadcast_object(str(folder), 0))
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder


def _new_folder(config: TrainConfig) -> Path:
    """Make an empty folder. One that is named after the time gets a number when another run took that name."""
    if config.name is not None:
        folder = Path(config.out, config.name)
        require(
            not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
            f"{folder} holds an earlier run: choose another --name, or move it away",
        )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    now = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in count(1):
        folder = Path(config.out, now if number == 1 else f"{now}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("count() does not end")


def _link_latest(folder: Path) -> None:
    """Point the link `latest`, beside the folder, to it; whoever looks sees the old target or the new one."""
    latest = folder.with_name("latest")
    require(
        latest.is_symlink() or not latest.exists(),
        f"{latest} is no link to the newest run but a folder or file: move it away",
    )
    fresh = folder.with_name(f".latest-{os.getpid()}")
    fresh.symlink_to(folder.name)
    fresh.replace(latest)


@contextmanager
def rank_log(folder: Path, mesh: engine.Mesh) -> Iterator[None]:
    """Write this rank's log, and the traceback of whatever ends the block, to logs/rank<number>.log."""
    handler = logging.FileHandler(folder / "logs" / f"rank{mesh.rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.info("rank %d (%s) of %s", mesh.rank, mesh.coordinate, mesh.layout)
    logging.info("process %d on %s, device %s", os.getpid(), socket.gethostname(), mesh.device)
    try:
        yield
    except BaseException:
        logging.exception("this rank stops")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def exit_with(error: Exception) -> NoReturn:
    """Show `error` as one line, once for the whole job, and end this process with exit code 2.

    torchrun ends all ranks when the first exits. So rank 0 speaks at once, another rank only if it is still alive
    after 5 s: then the error is its alone. A rank that lost its peers waits longer, for the one that knows the cause.
    """
    rank = int(os.environ.get("RANK", "0"))
    patience = (0 if rank == 0 else 5) + (10 if isinstance(error, CommunicationError) else 0)
    time.sleep(patience)
    print(f"error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun repeats what is in there at the end of its own summary
        told = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": told}))
    sys.exit(2)
