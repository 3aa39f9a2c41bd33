"""Texts packed into rows without leaking across their borders.

Where texts differ much in length, padding a batch to its longest wastes most of a GPU's work; a
packed row holds several texts, one behind the other. Positions start again at each text, and that
is how transformers knows where attention has to stop (with no attention mask and no cache): in
every attention implementation, and under sliding windows too. Models that carry a state from
token to token, or take no positions, would leak: `require_packable` finds that out by running one.

To train on packed rows (online fine-tuning):

    packed = pack(texts, capacity)                    # texts: lists of token ids
    hidden_BLD = packed_hidden_state(model, packed)   # with gradients where they are enabled
    hidden_AD = packed.text(hidden_BLD, i)            # text i's rows; labels stay inside a text

Shape suffixes: B rows, L their length, A tokens of one text, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_bpd.errors import HeadsError

PADDING = -1  # segment of the tokens behind a row's last text

_CHECKED = (5, 9)  # tokens of the two texts that `require_packable` runs
_LEAK = 0.05  # relative difference that is no rounding any more, even in bfloat16


@dataclass(frozen=True)
class Packed:
    """Texts in rows of one length; padding, if any, is a text of its own that nothing reads."""

    input_ids_BL: Tensor  # int64
    position_ids_BL: Tensor  # int64, 0 at the first token of each text
    segments_BL: Tensor  # int64, the number of the text that a token belongs to; PADDING for none
    places: list[tuple[int, int]]  # row and first column of each text, in the texts' order
    lengths: list[int]  # tokens of each text

    def text(self, values: Tensor, number: int) -> Tensor:
        """The part of `values` [B, L, ...] that belongs to one text, [A, ...]."""
        row, first = self.places[number]
        return values[row, first : first + self.lengths[number]]


def fill_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which texts share a row of `capacity` tokens: the longest first, each where it still fits.

    Raises HeadsError for a text longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise HeadsError(
                f"capacity: found {capacity} tokens a row, and a text of {lengths[i]}; expected "
                "room for the longest text"
            )
        row = next((row for row, left in enumerate(room) if lengths[i] <= left), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def pack(texts: Sequence[Sequence[int]], capacity: int, share: bool = True) -> Packed:
    """Pack token ids into rows of at most `capacity`, as long as the fullest.

    Without `share` each text has a row to itself, padded. Errors as `fill_rows`.
    """
    lengths = [len(text) for text in texts]
    rows = fill_rows(lengths, capacity) if share else [[i] for i in range(len(texts))]
    longest = max(sum(lengths[i] for i in row) for row in rows)
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.int64)
    positions_BL = torch.zeros_like(ids_BL)
    segments_BL = torch.full_like(ids_BL, PADDING)
    places = [(0, 0)] * len(texts)
    for number, row in enumerate(rows):
        first = 0
        for i in row:
            inside = slice(first, first + lengths[i])
            ids_BL[number, inside] = torch.tensor(texts[i])
            positions_BL[number, inside] = torch.arange(lengths[i])
            segments_BL[number, inside] = i
            places[i] = (number, first)
            first += lengths[i]
        positions_BL[number, first:] = torch.arange(longest - first)
    return Packed(ids_BL, positions_BL, segments_BL, places, lengths)


def packed_hidden_state(model: Any, packed: Packed) -> Tensor:
    """[B, L, D] behind the final norm, in the model's dtype, on its device; never any logits.

    Gradients flow wherever they are enabled. Rows of padding mean nothing.
    """
    hidden_BLD: Tensor = model.base_model(
        input_ids=packed.input_ids_BL.to(model.device),
        position_ids=packed.position_ids_BL.to(model.device),
        use_cache=False,
    ).last_hidden_state
    return hidden_BLD


def require_packable(model: Any) -> None:
    """Raise HeadsError if this model's texts leak into each other when they are packed."""
    vocab = int(model.config.get_text_config().vocab_size)
    texts = [[(7 * i + n) % vocab for i in range(n)] for n in _CHECKED]
    with torch.inference_mode():
        together = pack(texts, sum(_CHECKED))
        hidden_BLD = packed_hidden_state(model, together).float()
        for number, text in enumerate(texts):
            alone_BLD = packed_hidden_state(model, pack([text], len(text))).float()
            difference = (together.text(hidden_BLD, number) - alone_BLD[0]).abs().max()
            if difference > _LEAK * alone_BLD.abs().max():
                raise HeadsError(
                    f"target: {type(model).__name__}: packed texts leak into each other; expected "
                    "a model whose attention stops where positions start again; give "
                    "--no-packing to train it on padded batches"
                )
