"""Every process of an engine serves the same plugin and the same heads. Imports no vLLM.

The front end finds the heads, and says in its config which they are and which plugin found them;
a worker, perhaps on another machine, finds the same ones or fails at its start, naming its host.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_bpd.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from vllm_bpd.discovery import SHIPPED, from_hub
from vllm_bpd.errors import HeadsError

# Up to here every byte is hashed (0.1 s a core); beyond, the header and this many pieces.
WHOLE_BYTES = 64 << 20
PIECES = 256
PIECE_BYTES = 64 << 10
_CACHED = "models--"


@dataclass(frozen=True)
class Provenance:
    """Which heads the front end found, so that any machine can find and recognise them."""

    digest: str  # `heads_digest` of their folder
    folder: str  # their folder on the front end's machine
    repository: str | None = None  # hub id they come from
    commit: str | None = None  # of that repository
    inside: str = "."  # their folder within the repository
    shipped: str | None = None  # their name among the shipped ones

    def here(self, token: str | bool | None = None) -> Path:
        """Folder of the same heads on this machine; from the hub where they came from it.

        Raises HeadsError, naming host and folder, if there are none, or others. HF_HUB_OFFLINE is
        respected: then only the machine's own hub cache is looked into.
        """
        folder = self._folder(token)
        where = f"model: on host {socket.gethostname()}, {folder}"
        if not _has_heads(folder):
            raise HeadsError(
                f"{where}: no heads there; expected those of digest {self.digest[:12]} that the "
                "front end found: put them on storage that every node sees at the same path, or "
                "name a hub id"
            )
        found = heads_digest(folder)
        if found != self.digest:
            raise HeadsError(
                f"{where}: found heads of digest {found[:12]}; the front end has "
                f"{self.digest[:12]}; copy the same checkpoint to every node"
            )
        return folder

    def _folder(self, token: str | bool | None) -> Path:
        if self.shipped is not None:
            return SHIPPED / self.shipped
        folder = Path(self.folder)
        if self.repository is None or _has_heads(folder):
            return folder
        files = [(Path(self.inside) / name).as_posix() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        snapshot = from_hub(self.repository, self.commit, token, files)
        if snapshot is None:
            raise HeadsError(
                f"model: on host {socket.gethostname()}, {self.repository} at {self.commit} is "
                "neither in the hub cache nor to be had from the hub; download it there, or share "
                "the cache (HF_HOME)"
            )
        return snapshot / self.inside


def provenance(folder: Path) -> Provenance:
    """What other machines need to know of the heads found in `folder` on this one.

    A hub cache keeps them in `models--OWNER--NAME/snapshots/COMMIT/`: whatever branch was asked
    for, other machines get that commit.
    """
    folder = folder.absolute()
    digest = heads_digest(folder)
    shipped = folder.name if folder.parent == SHIPPED.absolute() else None
    for snapshot in (folder, *folder.parents):
        cached = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and cached.startswith(_CACHED):
            repository = cached.removeprefix(_CACHED).replace("--", "/")
            inside = folder.relative_to(snapshot).as_posix()
            return Provenance(digest, str(folder), repository, snapshot.name, inside)
    return Provenance(digest, str(folder), shipped=shipped)


def _has_heads(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE))


def heads_digest(folder: Path) -> str:
    """sha256 (hex, 64 characters) over both files of the heads in `folder`.

    Of weights beyond 64 MiB it covers the size, the header and 256 pieces of 64 KiB, evenly
    spaced with both ends: other heads differ in every piece, and it takes milliseconds.
    """
    digest = hashlib.sha256()
    config = (folder / CONFIG_FILE).read_bytes()
    path = folder / WEIGHTS_FILE
    size = path.stat().st_size
    digest.update(len(config).to_bytes(8, "little") + config + size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for start, length in _pieces(size, int.from_bytes(file.read(8), "little")):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _pieces(size: int, header_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and length, in bytes, of what is hashed of a weight file."""
    if size <= WHOLE_BYTES:
        yield from ((start, 1 << 20) for start in range(0, size, 1 << 20))
        return
    yield 0, min(8 + header_bytes, WHOLE_BYTES)
    last = size - PIECE_BYTES
    yield from ((place * last // (PIECES - 1), PIECE_BYTES) for place in range(PIECES))
