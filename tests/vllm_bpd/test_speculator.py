"""The V2 speculator's rows, buffers and CUDA graphs, with graphs replayed by plain calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the V2 speculator subclasses vLLM's")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from tests.vllm_bpd.plain_lattice import continuing_weights
from vllm_bpd import speculator as speculator_module
from vllm_bpd.lattice import draft_block
from vllm_bpd.speculator import BpdSpeculator, init_runner, init_speculator

HIDDEN, DRAFTS, MAX_REQS, VOCAB = 4, 3, 8, 50


class EchoHeads:
    """Drafts that tell which row and which sampled id they came from."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, hidden_BD: Tensor, sampled_B: Tensor) -> Tensor:
        self.batches.append(hidden_BD.shape[0])
        row_B = hidden_BD[:, 0].long()
        return torch.stack([row_B, sampled_B, row_B + sampled_B], dim=-1)

    def candidates(self, hidden_BD: Tensor, sampled_B: Tensor) -> tuple[Tensor, Tensor]:
        """Two heads, of which the second is unsure between two ids."""
        self.batches.append(hidden_BD.shape[0])
        row_B = hidden_BD[:, 0].long()
        first_BM = torch.stack([row_B + 20, torch.full_like(row_B, -1)], -1)
        second_BM = torch.stack([sampled_B + 20, row_B + 20], -1)
        logp_KM = torch.tensor([[-0.1, -torch.inf], [-0.7, -0.8]])
        return torch.stack([first_BM, second_BM], 1), logp_KM.expand(len(row_B), 2, 2)


def echo(speculator: BpdSpeculator) -> EchoHeads:
    """The speculator's stand-in heads."""
    heads: Any = speculator.model
    assert isinstance(heads, EchoHeads)
    return heads


class ReplayedGraph:
    """Stands in for a CUDA graph: what ran while it was recorded runs again on replay."""

    recording: ReplayedGraph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()


@pytest.fixture
def speculator() -> BpdSpeculator:
    made = BpdSpeculator.__new__(BpdSpeculator)
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4], max_cudagraph_capture_size=4
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )
    made.speculative_config = SimpleNamespace(enforce_eager=None, context_lookup=True)
    made.device = torch.device("cpu")
    made.vocab_size = VOCAB
    made.hidden_BD = torch.zeros(MAX_REQS, HIDDEN)
    made.sampled_B = torch.zeros(MAX_REQS, dtype=torch.int64)
    made.slots_B = torch.zeros(MAX_REQS, dtype=torch.int64)
    made.lattice_weights_PF = None
    made.draft_tokens = torch.zeros(MAX_REQS, DRAFTS, dtype=torch.int64)
    made.graphs = None
    made.model = EchoHeads()  # type: ignore[assignment]
    return made


def propose(made: BpdSpeculator, lengths: list[int], rejected: list[int], **more: Any) -> Tensor:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=len(lengths),
        query_start_loc=starts,
        idx_mapping=torch.arange(len(lengths)).flip(0),  # slots are not in batch order
    )
    total = int(starts[-1])
    states_TD = torch.arange(total).float()[:, None].expand(total, HIDDEN).contiguous()
    last_sampled = torch.arange(MAX_REQS) + 10
    return made.propose(
        batch, {}, {}, states_TD, None, torch.ones(len(lengths)), torch.tensor(rejected),
        last_sampled, torch.zeros(1), torch.zeros(1), torch.zeros(1), **more,
    )  # fmt: skip


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, speculator: BpdSpeculator) -> Iterator[None]:
    """Let the engine's own graph manager record into `ReplayedGraph`s."""
    original = BpdSpeculator._draft

    def draft(self: BpdSpeculator, num_reqs: int) -> None:
        if ReplayedGraph.recording is not None:
            ReplayedGraph.recording.calls.append(lambda: original(self, num_reqs))
        original(self, num_reqs)

    @contextlib.contextmanager
    def record(graph: ReplayedGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
        ReplayedGraph.recording = graph
        yield
        ReplayedGraph.recording = None

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(BpdSpeculator, "_draft", draft)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ReplayedGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "current_stream", lambda: None)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        cudagraph_utils,
        "capture_pool",
        lambda pool, config: contextlib.nullcontext(),
        raising=False,  # 0.30 has none yet
    )
    for pool in ("get_global_graph_pool", "graph_pool_handle"):
        monkeypatch.setattr(cudagraph_utils.current_platform, pool, lambda: None, raising=False)
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    speculator.capture()
    echo(speculator).batches.clear()
    yield
    ReplayedGraph.recording = None


def test_drafts_from_the_last_accepted_row_of_each_request(speculator: BpdSpeculator) -> None:
    drafts = propose(speculator, lengths=[4, 1, 4], rejected=[2, 0, 0])
    # Rows: 4 - 1 - 2, 5 - 1, 9 - 1; ids just sampled by slots 2, 1, 0.
    assert drafts.tolist() == [[1, 12, 13], [4, 11, 15], [8, 10, 18]]


def test_an_id_from_a_slot_that_never_sampled_is_clamped(speculator: BpdSpeculator) -> None:
    batch = SimpleNamespace(
        num_reqs=1, query_start_loc=torch.tensor([0, 1]), idx_mapping=torch.tensor([0])
    )
    zero = torch.zeros(1)
    for stale, used in ((-1, 0), (10**9, VOCAB - 1)):
        drafts = speculator.propose(
            batch, {}, {}, torch.zeros(1, HIDDEN), None, zero, torch.zeros(1, dtype=torch.int64),
            torch.tensor([stale]), zero, zero, zero,
        )  # fmt: skip
        assert drafts[0, 1] == used


def test_no_drafting_when_the_schedule_says_none(speculator: BpdSpeculator) -> None:
    propose(speculator, [2], [0], num_speculative_tokens=0)
    assert echo(speculator).batches == []


@pytest.mark.usefixtures("graphs")
def test_graphs_are_captured_for_the_decode_sizes(speculator: BpdSpeculator) -> None:
    assert speculator.graphs is not None
    assert sorted(d.num_reqs for d in speculator.graphs.graphs) == [1, 2, 4]


@pytest.mark.usefixtures("graphs")
def test_a_graph_pads_the_batch_and_gives_the_eager_drafts(speculator: BpdSpeculator) -> None:
    drafts = propose(speculator, lengths=[4, 1, 4], rejected=[2, 0, 0])
    assert echo(speculator).batches == [4]
    assert drafts.tolist() == [[1, 12, 13], [4, 11, 15], [8, 10, 18]]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("profile", [True, False])
def test_eager_beyond_the_captured_sizes_and_while_profiling(
    speculator: BpdSpeculator, profile: bool
) -> None:
    requests = 3 if profile else 5
    drafts = propose(speculator, [1] * requests, [0] * requests, is_profile=profile)
    assert echo(speculator).batches == [requests]
    assert drafts[:, 0].tolist() == list(range(requests))
    assert speculator.graphs is not None
    assert all(graph.replays == 0 for graph in speculator.graphs.graphs.values())


def test_no_graphs_where_the_engine_captures_no_decode_graphs(
    speculator: BpdSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    speculator.init_cudagraph_manager(CUDAGraphMode.PIECEWISE)
    assert speculator.graphs is not None
    assert not speculator.graphs.needs_capture()
    assert propose(speculator, [2, 2], [0, 1])[:, 0].tolist() == [1, 2]


# What requests say, in order of their slots; the engine's table has stale ids behind each end.
SAYS = [[5, 6, 7, 8, 5, 6, 10], [9, 1, 2, 3, 4, 9, 11], [12], [3, 13, 8, 7, 13], [14]]
TABLE_WIDTH = 9


@pytest.fixture
def lattice(speculator: BpdSpeculator) -> BpdSpeculator:
    """The speculator with a lattice of five places, which searches the last six tokens."""
    tokens_TL = torch.full((MAX_REQS, TABLE_WIDTH), 6, dtype=torch.int32)
    lengths_T = torch.zeros(MAX_REQS, dtype=torch.int32)
    for slot, row in enumerate(SAYS):
        tokens_TL[slot, : len(row)] = torch.tensor(row)
        lengths_T[slot] = len(row)
    speculator.req_states = SimpleNamespace(
        total_len=SimpleNamespace(gpu=lengths_T), all_token_ids=SimpleNamespace(gpu=tokens_TL)
    )
    speculator.window_W = torch.arange(-6, 0)
    speculator.lattice_weights_PF = continuing_weights(5)
    speculator.draft_tokens = torch.zeros(MAX_REQS, 5, dtype=torch.int64)
    return speculator


def test_windows_end_with_each_requests_newest_token(lattice: BpdSpeculator) -> None:
    window_BW = lattice._windows(torch.tensor([2, 0, 3, 1]))
    assert window_BW.dtype == torch.int32
    assert window_BW.tolist() == [
        [-1, -1, -1, -1, -1, 12],
        [6, 7, 8, 5, 6, 10],
        [-1, 3, 13, 8, 7, 13],
        [1, 2, 3, 4, 9, 11],
    ]
    assert lattice._windows(torch.tensor([7])).tolist() == [[-1] * 6]  # a slot that says nothing


def test_a_window_may_be_wider_than_the_table(lattice: BpdSpeculator) -> None:
    lattice.window_W = torch.arange(-20, 0)
    assert lattice._windows(torch.tensor([4, 0])).tolist() == [
        [-1] * 19 + [14],
        [-1] * 13 + [5, 6, 7, 8, 5, 6, 10],
    ]


def test_without_context_lookup_the_table_is_not_read(lattice: BpdSpeculator) -> None:
    lattice.speculative_config.context_lookup = False
    lattice.req_states = None
    assert lattice._windows(torch.tensor([2, 0])).tolist() == [[-1, -1], [-1, -1]]


def written_out(slots: list[int], rows: list[int]) -> list[list[int]]:
    """The drafts of requests in `slots`, from `rows` of hidden states and ids just sampled."""
    states_BD = torch.tensor(rows).float()[:, None].expand(len(rows), HIDDEN)
    candidates = EchoHeads().candidates(states_BD, torch.tensor([slot + 10 for slot in slots]))
    window_BW = torch.tensor([([-1] * 6 + SAYS[slot])[-6:] for slot in slots])
    ids_BP: list[list[int]]
    ids_BP = draft_block(window_BW, *candidates, continuing_weights(5)).ids_BP.tolist()
    return ids_BP


def test_a_lattice_drafts_from_each_requests_own_text(lattice: BpdSpeculator) -> None:
    drafts = propose(lattice, lengths=[4, 1, 4, 1], rejected=[2, 0, 0, 0])
    # The rows are those of heads alone; slots are 3, 2, 1, 0.
    assert drafts.tolist() == written_out([3, 2, 1, 0], [1, 4, 8, 9])
    # The first follows its text, 8 7 13 8 7; what the heads say there, they say elsewhere.
    assert drafts[0].tolist() == [8, 7, 13, 8, 7]
    assert drafts[1, :2].tolist() == [24, 32]


@pytest.mark.usefixtures("lattice", "graphs")
def test_a_graph_sees_texts_that_grew_since_it_was_recorded(lattice: BpdSpeculator) -> None:
    eager = written_out([3, 2, 1, 0], [1, 4, 8, 9])
    drafts = propose(lattice, lengths=[4, 1, 4, 1], rejected=[2, 0, 0, 0])
    assert echo(lattice).batches == [4]
    assert drafts.tolist() == eager
    lattice.req_states.all_token_ids.gpu[0, 7] = 8
    lattice.req_states.total_len.gpu[0] = 8
    drafts = propose(lattice, lengths=[1], rejected=[0])
    assert drafts[0, :4].tolist() == [5, 6, 10, 8]
    assert lattice.graphs is not None
    assert sum(graph.replays for graph in lattice.graphs.graphs.values()) == 2


@pytest.mark.usefixtures("lattice", "graphs")
def test_a_padded_graph_gives_the_eager_drafts(lattice: BpdSpeculator) -> None:
    buffer_BP = lattice.draft_tokens
    drafts = propose(lattice, lengths=[4, 1, 4], rejected=[2, 0, 0])
    assert echo(lattice).batches == [4]
    assert drafts.tolist() == written_out([2, 1, 0], [1, 4, 8])
    assert drafts.data_ptr() == buffer_BP.data_ptr()  # a real graph writes where it was recorded


@pytest.mark.parametrize(("window", "limit", "width"), [(8192, 100, 100), (50, 100, 50)])
def test_no_more_is_searched_than_a_request_can_say(
    monkeypatch: pytest.MonkeyPatch, window: int, limit: int, width: int
) -> None:
    def init(self: Any, vllm_config: Any, device: Any) -> None:
        self.max_num_reqs, self.hidden_size, self.dtype = MAX_REQS, HIDDEN, torch.float32

    monkeypatch.setattr(DraftModelSpeculator, "__init__", init)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            context_window=window,
            min_confidence_per_batch_size=None,
            heads_up_to_batch_size=None,
        ),
        model_config=SimpleNamespace(max_model_len=limit),
    )
    made = BpdSpeculator(config, torch.device("cpu"), "states")
    assert made.req_states == "states"
    assert made.window_W.tolist() == list(range(-width, 0))
    assert made.lattice_weights_PF is None


@pytest.mark.parametrize("weights_PF", [None, continuing_weights(5)], ids=["none", "lattice"])
def test_the_lattice_comes_with_the_heads(
    speculator: BpdSpeculator, monkeypatch: pytest.MonkeyPatch, weights_PF: Tensor | None
) -> None:
    heads: Any = SimpleNamespace(lattice_weights_PF=weights_PF)
    monkeypatch.setattr(speculator_module, "load_heads_model", lambda config, target: heads)
    assert speculator.load_draft_model(nn.Module(), set()) is heads
    if weights_PF is None:
        assert speculator.lattice_weights_PF is None
    else:
        assert speculator.lattice_weights_PF is not None
        assert torch.equal(speculator.lattice_weights_PF, weights_PF)


@pytest.mark.parametrize("given", [(), ("states",)], ids=["before 0.32", "from 0.32 on"])
def test_our_method_gets_our_speculator(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    class Made(BpdSpeculator):
        def __init__(self, *given: Any) -> None:
            self.given = given

    monkeypatch.setattr(speculator_module, "BpdSpeculator", Made)

    def built(method: str) -> Any:
        config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
        return init_speculator(lambda *args: args[1:], config, device, *given)

    device = torch.device("cpu")
    assert built("eagle") == (device, *given)
    assert isinstance(built("bpd"), Made)
    assert built("bpd").given[1:] == (device, *given)


@pytest.mark.parametrize("ours", [True, False])
def test_our_speculator_gets_what_the_runner_makes_after_it(
    speculator: BpdSpeculator, ours: bool
) -> None:
    runner = SimpleNamespace()
    other = SimpleNamespace(req_states=None)

    def original(runner: Any, vllm_config: Any, device: Any) -> None:
        runner.speculator = speculator if ours else other
        runner.req_states = (vllm_config, device)

    init_runner(original, runner, "config", "device")
    assert (
        runner.speculator.req_states == ("config", "device") if ours else other.req_states is None
    )
