"""A stage without the target's embedding reads the checkpoint's, on one rank and on two."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="the embedding is vLLM's")

from tests.vllm_bpd.fresh import embedded_on_rank, run_fresh
from tests.vllm_bpd.samples import EMBEDDING, HIDDEN, LM_HEAD, random_matrix, write_target
from vllm_bpd.fingerprint import stored_embedding

VOCAB = 131
IDS = [0, 5, 63, 64, 96, 130]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stored_rows", [VOCAB, VOCAB + 5], ids=["plain", "padded"])
def test_rows_are_the_checkpoints(
    fresh_process: ForkServerContext, tmp_path: Path, size: int, stored_rows: int
) -> None:
    table_VD = random_matrix(stored_rows, HIDDEN, seed=4)
    tensors = {EMBEDDING: table_VD, LM_HEAD: random_matrix(VOCAB, HIDDEN, seed=5)}
    target = write_target(tmp_path / "target", tensors, vocab_size=VOCAB)
    arguments = [(rank, size, str(tmp_path), str(target), IDS) for rank in range(size)]
    for rows_BD, missing in run_fresh(fresh_process, embedded_on_rank, *arguments):
        assert torch.equal(rows_BD, table_VD[IDS])
        assert missing == (True, False)


def test_rows_are_found_where_the_engine_downloaded_them(
    fresh_process: ForkServerContext, tmp_path: Path
) -> None:
    table_VD = random_matrix(VOCAB, HIDDEN, seed=4)
    home = tmp_path / "weights" / "models--me--model"
    write_target(home / "snapshots" / ("1" * 40), {EMBEDDING: table_VD}, vocab_size=VOCAB)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("1" * 40)
    arguments = (0, 1, str(tmp_path), "me/model", IDS, str(tmp_path / "weights"))
    [(rows_BD, _)] = run_fresh(fresh_process, embedded_on_rank, arguments)
    assert torch.equal(rows_BD, table_VD[IDS])


def test_a_checkpoint_without_a_plain_embedding_has_none(
    fresh_process: ForkServerContext, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", {LM_HEAD: random_matrix(VOCAB, HIDDEN)})
    assert stored_embedding(target, VOCAB, HIDDEN) is None
    with pytest.raises(AssertionError) as caught:
        run_fresh(fresh_process, embedded_on_rank, (0, 1, str(tmp_path), str(target), IDS))
    assert (
        "HeadsError: pipeline_parallel_size: these heads read the sampled token's embedding on "
        f"the last stage, and {target} has no plain one in safetensors; serve it with tensor "
        "parallelism alone, or with heads whose conditioning is none"
    ) in str(caught.value)
