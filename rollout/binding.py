"""A live model and the shell that runs on its parameters: where weight_sync and engine meet."""

from __future__ import annotations

from torch import nn

from stoker.engine.experts import take_over_experts
from stoker.engine.fused_layers import fuse_layers, fusion_groups
from stoker.engine.kv_cache import LayerShape
from stoker.engine.model import ModelShell, check_supported
from stoker.kernels.errors import UnsupportedModelError
from stoker.kernels.ops import Ops, ops_for
from stoker.weight_sync.aliased import AliasedSource
from stoker.weight_sync.source import source_for, unwrap


class ModelBinding:
    """Keeps a shell bound to the model as it is now, through whatever the trainer does to it.

    Raises ``UnsupportedModelError`` where the model cannot be borrowed. Nothing of the model is changed before ``fuse``.
    """

    def __init__(self, model: nn.Module, *, deterministic: bool = False) -> None:
        self.model = model
        self.deterministic = deterministic
        self.source = source_for(model)
        check_supported(self.source.module)
        self.max_model_len = 0
        self.shell: ModelShell
        self.shapes: list[LayerShape]
        self.ops: Ops
        self.fused_layers = 0
        self._checksums: list[int] | None = None

    def build(self, max_model_len: int) -> None:
        """Make the shell, and see what its layers store of a token."""
        self.max_model_len = max_model_len
        self.shell = self._new_shell(self.source)
        self.shapes = self.shell.layer_shapes()
        layers = [(shape.key_dim, shape.value_dim, shape.dtype) for shape in self.shapes]
        self.ops = ops_for(self.source.device, layers, deterministic=self.deterministic)

    def fuse(self) -> None:
        """Lay weights side by side and replace layers by their fused form. On any exception the model is as it was."""
        try:
            self._fuse(self.shell, self.source)
        except BaseException:
            self.source.release()
            raise

    def refresh(self) -> None:
        """Take the weights as they are now.

        Raises ``WeightsMovedError`` or ``UnsupportedModelError`` where that cannot be; the binding then keeps the old
        shell, and goes on failing.
        """
        if self.moved():
            self.source.check()
            source = source_for(self.model)
            shell = self._new_shell(source)
            same_kind = (source.dtype, source.device) == (self.source.dtype, self.source.device)
            if not same_kind or shell.layer_shapes() != self.shapes or shell.vocab != self.shell.vocab:
                raise UnsupportedModelError(
                    "the model has another shape than the engine was built for: build a new engine"
                )
            source.succeed(self.source)
            self._fuse(shell, source)
            self.source, self.shell = source, shell
        self._checksums = None

    def moved(self) -> bool:
        """Whether any tensor of the model was added, replaced or moved since it was bound."""
        return unwrap(self.model) is not self.source.module or self.source.moved()

    def rewritten(self) -> bool:
        """Whether the weights hold other numbers than at the last look, with no ``refresh`` since."""
        before, self._checksums = self._checksums, self.source.checksums()
        return before is not None and before != self._checksums

    def release(self) -> None:
        """Give the model's parameters storages of their own again."""
        self.source.release()

    def _new_shell(self, source: AliasedSource) -> ModelShell:
        shell = ModelShell(source.module, self.max_model_len)
        shell.bind(source.tensors(), source.module)
        return shell

    def _fuse(self, shell: ModelShell, source: AliasedSource) -> None:
        take_over_experts(shell.module, self.ops)
        fused = source.rehome(fusion_groups(shell))
        self.fused_layers, whole = fuse_layers(shell, self.ops, fused)
        if self.deterministic and not whole:
            raise UnsupportedModelError(
                f"{type(source.module).__name__} has layers that run their own matmuls, whose bits depend on the batch: "
                "deterministic=True cannot be had for it"
            )
        source.bind()
