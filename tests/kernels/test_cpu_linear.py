"""A CPU's own projections against fp64: which of them oneDNN computes, in how many shapes, and that it sees live weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from linears import expected_linear, make_linear
from lora_oracle import dense, make_table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from triton_oracle import assert_close

from stoker.kernels.cpu import linear as cpu_linear
from stoker.kernels.ops import CPU, REFERENCE
from stoker.kernels.reference.lora import AdapterRows
from stoker.rollout import RolloutEngine, SamplingParams

LEAST = 32 * 32  # of a weight here; 2**16 and 2**18 where it counts
Rows = tuple[int, int]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """As on a processor where oneDNN pays, with small weights taken for large; the rows of the matrices it was given, each time."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    calls: list[Rows] = []
    onednn = cpu_linear._onednn

    def counted(left: Tensor, right: Tensor, *others: Tensor | None) -> Tensor:
        calls.append((left.shape[0], right.shape[0]))
        return onednn(left, right, *others)

    monkeypatch.setattr(cpu_linear, "_PAYS", True)
    monkeypatch.setattr(cpu_linear, "_LEAST_NUMBERS", LEAST)
    monkeypatch.setattr(cpu_linear, "_LEAST_OF_ONE_ROW", LEAST)
    monkeypatch.setattr(cpu_linear, "_LEAST_PRODUCTS", 5 * LEAST)
    monkeypatch.setattr(cpu_linear, "_SHORT", 80)
    monkeypatch.setattr(cpu_linear, "_onednn", counted)
    return calls


@pytest.mark.parametrize("options", ["", "b", "n", "r", "s", "bnrg", "bots", "cbrg"])
@pytest.mark.parametrize(
    ("rows", "given"), [(1, 1), (2, None), (3, 3), (4, 4), (5, 16), (16, 16), (61, 64), (71, 80), (128, 128)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_linear(rows: int, given: int | None, options: str, in_place: bool, asked: list[Rows]) -> None:
    arguments = make_linear(rows, 80, 36, options, torch.float32)
    expected = expected_linear(**arguments)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    out = CPU.linear(**arguments, in_place=in_place)
    width, in_any_layout = len(arguments["weight"]), arguments["gated"] or arguments["residual"] is not None
    weight_first = rows > 4 and (in_any_layout or rows <= 64)
    assert asked == ([] if given is None else [(width, given) if weight_first else (given, width)])
    assert out.is_contiguous() or (arguments["gated"] and out.t().is_contiguous())
    assert_close(out, expected, torch.float32)
    if in_place and arguments["residual"] is not None:
        assert out.data_ptr() == arguments["residual"].data_ptr()
        del before["residual"]
    assert all(torch.equal(arguments[name], tensor) for name, tensor in before.items())


def test_shapes_are_few(asked: list[Rows]) -> None:
    """What oneDNN compiles for a shape stays in memory for good."""
    x, weight = torch.randn(300, 32), torch.randn(40, 32)
    for rows in range(1, 301):
        assert_close(CPU.linear(x[:rows], weight), x[:rows].double() @ weight.t().double(), torch.float32)
    assert len(asked) == 127 and len(set(asked)) == 11  # of two rows MKL is the fastest


@pytest.mark.parametrize("rows", [2, 7])
def test_logits_are_there_once(rows: int, asked: list[Rows]) -> None:
    x, weight = torch.randn(rows, 32), torch.randn(2**18 // rows + 1, 32)
    out = CPU.linear(x, weight)
    assert asked == [(2 if rows == 2 else 16, len(weight))]
    assert_close(out, x.double() @ weight.t().double(), torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 48, 100])
def test_a_down_projection_takes_what_lies_by_columns(rows: int, asked: list[Rows]) -> None:
    x, gate_up, down = torch.randn(rows, 36), torch.randn(128, 36), torch.randn(36, 64)
    between = CPU.linear(x, gate_up, gated="silu")
    out = CPU.linear(between, down, residual=x)
    expected = expected_linear(
        x=between.contiguous(), weight=down, bias=None, norm=None, gated=None, residual=x, scale=1.0
    )
    assert out.is_contiguous() and (rows == 1 or between.t().is_contiguous() == (rows == 2 or rows > 4))
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("how", ["plain", "bias", "gains", "none"])
@pytest.mark.parametrize(
    "slots",
    [[2] * 20, [1] * 10 + [2] * 10, [0] * 4 + [1] * 8 + [3] * 8, [1, 2, 3, 0] * 5, [3, 1, 2] * 6, [2, 0], [1, 2, 2]],
)
def test_adapters_over_what_lies_by_columns(slots: list[int], how: str, asked: list[Rows]) -> None:
    gains, shifts = ((1, 2), (3,)) if how == "gains" else ((), ())
    ranks = {1: 3, 2: 8, 3: 8}
    table = make_table([64, 64], 36, ranks, torch.float32, biased=how == "bias", gains=gains, shifts=shifts)
    rows = AdapterRows(torch.tensor([0] * len(slots) if how == "none" else slots))
    x, weight, bias = torch.randn(len(slots), 36), torch.randn(128, 36), torch.randn(128) if how == "bias" else None
    assert CPU.adapted_linear is not None
    gate, up = dense(x, F.linear(x, weight, bias), table, rows.slots).chunk(2, 1)
    for _ in range(2):  # steps
        assert_close(CPU.adapted_linear(x, weight, bias, table, rows, gated="silu"), F.silu(gate) * up, torch.float32)
    assert len(slots) < 5 or asked == [(128, 32)] * 2  # the weight on the left


@pytest.mark.filterwarnings("ignore:TF32")  # from turning oneDNN off
def test_what_is_left_to_the_reference(asked: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(6, 32), torch.randn(32, 32)
    many, double = torch.randn(129, 32), torch.float64
    for given in (
        (x[:0], weight),
        (many, weight),
        (x, weight[1:]),
        (x, weight.t()),
        (x.to(double), weight.to(double)),
        (x.bfloat16(), weight.bfloat16()),
    ):
        assert torch.equal(CPU.linear(*given), REFERENCE.linear(*given))
    narrow, scales = torch.empty(32, 32, dtype=torch.float8_e4m3fn), torch.empty(32)
    CPU.quantise_rows(weight, narrow, scales)
    assert torch.equal(CPU.linear(x, narrow, row_scales=scales), REFERENCE.linear(x, narrow, row_scales=scales))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(CPU.linear(x, weight), REFERENCE.linear(x, weight))
    assert not asked
    monkeypatch.setattr(cpu_linear, "_PAYS", False)
    assert torch.equal(CPU.linear(x, weight), REFERENCE.linear(x, weight)) and not asked


def test_an_engine_samples_from_the_weights_of_now(asked: list[Rows]) -> None:
    """Log-probabilities of a rollout are those of the model's own forward, before and after its weights change in place."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    prompts = [[1, 2, 3], [4, 5], [6]] * 2
    with RolloutEngine(model) as engine:
        for _ in range(2):
            asked.clear()
            for output in engine.generate_batch(prompts, SamplingParams(max_tokens=6, seed=0, ignore_eos=True)):
                completion, prompt = output.completions[0], output.prompt_token_ids
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
                wanted = logits.log_softmax(-1)[range(6), completion.token_ids]
                torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-5, rtol=0)
            assert 16 in {rows for _, rows in asked}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            engine.update_weights()
