"""Random heads for the tiny targets, written through the plugin's own public functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HEAD_HIDDEN = 24


def write_heads(
    target: Path, directory: Path, num_heads: int, places: int | None = None, **config: Any
) -> Path:
    """Write random heads for the target checkpoint `target`; `config` are further config fields.

    With `draft_vocab_size`, the ids scored are every other one from 1 on. With `places`, they have
    a lattice of that many places, whose weights trust longer matches more.
    """
    import torch

    from vllm_bpd.checkpoint import save_heads
    from vllm_bpd.config import HeadsConfig
    from vllm_bpd.fingerprint import read_fingerprint
    from vllm_bpd.heads import BlockwiseHeads

    fingerprint = read_fingerprint(target)
    torch.manual_seed(num_heads)
    made = HeadsConfig(num_heads, HEAD_HIDDEN, fingerprint, **config)
    ids = None
    if made.draft_vocab_size is not None:
        ids = torch.arange(made.draft_vocab_size) * 2 + 1
    heads = BlockwiseHeads(made)
    lattice = start_of_lattice(places)
    save_heads(directory, heads, ids, dtype=torch.float32, lattice_weights_PW=lattice)
    return directory


def start_of_lattice(places: int | None) -> Any:
    """Weights of that many places, as a fit starts from them; none for none."""
    if places is None:
        return None
    from heads_training.lattice_fit import initial_weights

    return initial_weights().repeat(places, 1)


def most_visited(visits_V: Any, count: int) -> Any:
    """The `count` ids that were visited most, ascending."""
    return visits_V.argsort(descending=True, stable=True)[:count].sort().values


def write_chain_heads(
    target: Path,
    directory: Path,
    num_heads: int,
    places: int | None = None,
    draft_vocab_size: int | None = None,
    width: int = 64,
) -> Path:
    """Write heads that draft what mostly follows the token just sampled, for a `settled` target.

    Its next token depends on little but the last one, so the chain of likeliest successors is
    known for every token. Random features of the tokens' embeddings, one least-squares solution:
    exact if the features, `width` of them, outnumber the tokens.

    With `draft_vocab_size`, the ids scored are those that most chains come through. With `places`,
    they have a lattice of that many places, as in `write_heads`.
    """
    import torch
    from safetensors.torch import load_file

    from integration_tests.harness.statistics import bigram_logits
    from vllm_bpd.checkpoint import save_heads
    from vllm_bpd.config import HeadsConfig
    from vllm_bpd.fingerprint import read_fingerprint
    from vllm_bpd.heads import BlockwiseHeads

    config = HeadsConfig(
        num_heads,
        width,
        read_fingerprint(target),
        activation="relu",
        draft_vocab_size=draft_vocab_size,
    )
    heads = BlockwiseHeads(config)
    torch.manual_seed(num_heads)
    tensors = load_file(target / "model.safetensors")
    embedding_VD = tensors["model.embed_tokens.weight"]
    directions_VD = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=-1)
    rms_VD = torch.nn.functional.rms_norm(embedding_VD, embedding_VD.shape[-1:], eps=1e-6)
    successor_V = bigram_logits(target).argmax(dim=-1)
    visits_V = torch.zeros(len(successor_V), dtype=torch.int64)
    with torch.no_grad():
        hidden, output = heads.hidden_layer.weight, heads.output_layer.weight
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(output, torch.Tensor)
        hidden.normal_(std=0.1)
        hidden[:, : config.hidden_size] = 0.0  # the token alone decides
        features_VF = (rms_VD @ hidden[:, config.hidden_size :].T).relu()
        token_V = successor_V
        for head in range(num_heads):
            wanted_VD = 100 * directions_VD[token_V]  # far louder than the state it is added to
            solved_FD = torch.linalg.lstsq(features_VF, wanted_VD).solution
            rows = slice(head * config.hidden_size, (head + 1) * config.hidden_size)
            output[rows] = solved_FD.T
            visits_V += torch.bincount(token_V, minlength=len(visits_V))
            token_V = successor_V[token_V]
    ids = None if draft_vocab_size is None else most_visited(visits_V, draft_vocab_size)
    lattice = start_of_lattice(places)
    save_heads(directory, heads, ids, dtype=torch.float32, lattice_weights_PW=lattice)
    return directory
