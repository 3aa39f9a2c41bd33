"""One training in a folder at a time: the second one refuses rather than mix with the first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_bpd.errors import HeadsError

LOCK_FILE = ".training.lock"


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold `folder` (made if missing) for this process; the system lets go when it ends, or dies.

    Raises HeadsError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another one"
            raise HeadsError(
                f"work: {folder} is in use: process {holder} is training there; wait until it has "
                "ended, or name another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
