"""Recurrent layers, which keep a state for each sequence: gated delta rule, also Kimi's, Mamba, Mamba-2, short convolutions.

Transformers has no interface for them as it has for attention. But the forwards of its modules all call the same few global
functions, so that kernels can be exchanged. In the shell these forwards call the engine's functions instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.engine.adapters.checks import is_linear, not_run_alone
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.reference.adapter_weights import AdapterWeights

_CONVOLUTION = "causal_conv1d_fn"
_ANY_STEP = (0.0, float("inf"))
_READ = "dt_proj"  # Mamba's linear that is not called with tokens


class RecurrentLayers:
    """Has all recurrent modules of a shell run in the step's context. No module is renamed and no tensor touched."""

    def __init__(self, module: nn.Module) -> None:
        self.context: Any = None  # of the step under way; not kept any longer, as it has tensors of the KV cache
        self._mixers: list[str] = []  # paths of those
        self._called: set[str] = set()  # paths of linears in them
        for path, mixer in module.named_modules():
            forward = inspect.unwrap(type(mixer).forward)
            if isinstance(forward, FunctionType) and _CONVOLUTION in forward.__code__.co_names:
                functions = _Functions(self, mixer.layer_idx)
                mixer.forward = functions.called_by(forward).__get__(mixer)
                self._mixers.append(path)
                linears = (name for name, part in mixer.named_modules() if is_linear(part) and name != _READ)
                self._called |= {f"{path}.{name}" for name in linears}

    def check(self, name: str, adapter: AdapterWeights) -> None:
        """Raise ``UnsupportedModelError`` where an adapter has its own copy of a module with a state, or of its parts.

        The state cannot be moved on twice. Only linears among its parts are called with tokens; the others are just read.
        """
        for path in (path for link in adapter.links for path in (*link.saved, *link.biases)):
            part = any(f"{m}.".startswith(f"{path}.") or path.startswith(f"{m}.") for m in self._mixers)
            if part and path not in self._called:
                raise not_run_alone(name, path)

    @contextmanager
    def within(self, context: Any) -> Iterator[None]:
        """Context manager: the modules run in this step's context."""
        self.context = context
        try:
            yield
        finally:
            self.context = None


class _Functions:
    """What the forward of one layer's module calls, with transformers' arguments; tensors have a batch of one."""

    def __init__(self, layers: RecurrentLayers, layer: int) -> None:
        self.layers, self.layer = layers, layer

    def called_by(self, forward: FunctionType) -> Callable[..., Any]:
        """``forward`` with these functions in place of those it calls."""
        names = forward.__globals__ | {
            _CONVOLUTION: self.convolve,
            "torch_chunk_gated_delta_rule": self.delta_rule,
            "chunk_kimi_delta_attention": self.delta_rule,
            "mamba2_chunk_scan": self.scan,
            "mamba_selective_scan": self.scan_channels,
        }
        return FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)

    def convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
    ) -> Tensor:
        """hidden_states: [1, C, T]; weight: [C, K]."""
        if activation not in (None, "silu", "swish"):
            raise UnsupportedModelError(f"layer {self.layer} has {activation!r} after its convolution")
        act = activation and "silu"
        out: Tensor = self.layers.context.convolve(self.layer, hidden_states[0].T, weight, bias, activation=act)
        return out.T[None]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """query, key, value: [1, T, heads, dim]; beta: [1, T, heads]; g: [1, T, heads], or Kimi's, [1, T, heads, key dim]."""
        tensors = (t[0] for t in (query, key, value, g.float(), beta))
        out: Tensor = self.layers.context.delta_rule(self.layer, *tensors, normalise=use_qk_l2norm_in_kernel)
        return out[None], query.new_empty(0)  # the state is kept already

    def scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_limit: tuple[float, float] | None = None,
        dt_softplus: bool = False,
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, None]:
        """hidden_states: [1, T, heads, dim]; dt: [1, T, heads]; B, C: [1, T, groups, state]."""
        assert dt_softplus
        out: Tensor = self.layers.context.scan(
            self.layer, hidden_states[0], dt[0], A, B[0], C[0], D, dt_bias=dt_bias, dt_limit=dt_limit or _ANY_STEP
        )[None]
        return (out, None) if return_final_states else out

    def scan_channels(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Of Mamba, whose channels are the rows of one head. hidden_states, dt, z: [1, channels, T]; A: [channels, state]; B, C:
        [1, state, T]; D, delta_bias: [channels]."""
        assert delta_softplus
        # Copies even of what lies right: D and the bias, which are read while the launch before may still run, were just made.
        whole = torch.contiguous_format
        x, steps, of_input, of_output = (
            t[0].T.unsqueeze(1).clone(memory_format=whole) for t in (hidden_states, dt, B, C)
        )
        skip, bias = (None if t is None else t[None] for t in (D, delta_bias))
        options = {"dt_bias": bias, "dt_limit": _ANY_STEP}
        out: Tensor = self.layers.context.scan(self.layer, x, steps, A[None], of_input, of_output, skip, **options)
        out = out.squeeze(1).T[None]
        out = out if z is None else out * F.silu(z)
        return (out, out.new_empty(0)) if return_last_state else out  # the state is kept already
