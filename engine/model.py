"""The engine's model: a shell of the trainer's own class around the trainer's own tensors, with paged attention inside.

The shell is built on the ``meta`` device, so it owns no weights. Its attention calls ``StepContext`` through transformers'
``AttentionInterface``; each step's context is passed on as a keyword of the forward call.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from stoker.engine.adapters.lora import LoraLayers
from stoker.engine.attention import PAGED, PROBED, attending_by, check_masks, route_text
from stoker.engine.cache.kv_cache import LayerShape
from stoker.engine.layers.experts import EXPERTS
from stoker.engine.layers.indexed import IndexedLayers
from stoker.engine.layers.quantised import is_packed, take_over_quantised
from stoker.engine.layers.recurrent import RecurrentLayers
from stoker.engine.module_settings import Settings, is_setting
from stoker.engine.parallel.tensor_parallel import TensorParallel
from stoker.engine.step_context import PackedPositions, ShapeProbe, cache_name
from stoker.engine.supported_models import SCALED_BY_LENGTH, check_length, check_supported, decoder_of
from stoker.engine.written_classes import build
from stoker.kernels.errors import UnsupportedModelError, first_line
from stoker.kernels.reference.lora import AdapterRows

_OF_THE_SHELL = {"training", "layer_idx"}  # settings of modules that the shell does not take over


class ModelShell:
    """Runs packed tokens of many sequences through the trainer's architecture.

    Raises ``UnsupportedModelError`` for an architecture it cannot run, before any tensor is touched.
    """

    def __init__(self, model: nn.Module, max_model_len: int) -> None:
        check_supported(model)
        assert isinstance(model, PreTrainedModel)
        check_length(model, max_model_len)
        self.settings = Settings()  # the model's own, taken over by the shell
        for part in {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}.values():
            self.settings.watch_numbers(part)
        config = copy.deepcopy(model.config)
        route_text(config, PAGED)
        config._experts_implementation = EXPERTS
        for part in (config, config.get_text_config(decoder=True)):
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
        # Skip classes that torch put in front of the model's own: composable DDP's cannot be built.
        kind = next(c for c in type(model).__mro__ if c.__module__.partition(".")[0] != "torch")
        with torch.device("meta"), _Undrawn(), torch.random.fork_rng(devices=[]):
            self.module: Any = build(kind, config)
        self.module.eval().requires_grad_(False)
        self.recurrent = RecurrentLayers(self.module)
        self.indexed = IndexedLayers(self.module)
        self.decoder: Any = decoder_of(self.module)
        self.config: Any = self.decoder.config
        self.lora: LoraLayers
        self.hidden: Callable[[Tensor, Tensor, Any], Tensor] = self._module_hidden
        self.logits: Callable[[Tensor], Tensor] = self.module_logits
        self.refresh: Callable[[], None] = lambda: None  # computes anew what is derived from weights or buffers
        # Has each rank compute the logits of a part of the vocabulary; None where the model's own forward runs.
        self.share_head: Callable[[TensorParallel], None] | None = None
        self.max_model_len = max_model_len
        self.num_layers = int(self.config.num_hidden_layers)
        self.vocab = int(self.module.get_output_embeddings().weight.shape[0])
        # The ids with an embedding: more than those with an output where the head is narrower.
        self.embedded = int(self.module.get_input_embeddings().weight.shape[0])
        self.has_wide_head = False
        self.same_keys: dict[int, int] = {}  # layers that attend to another layer's keys: which one's
        self._places: dict[
            str, tuple[dict[str, Any], str]
        ] = {}  # by tensor name: a module's registry, and the name in it
        self.stood_for: dict[str, str] = {}  # by tensor name: the name of another tensor, bound in its place

    def bind(self, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Put the trainer's tensors in place by name. No copies.

        tensors: every parameter and buffer, tied ones under each of their names. modules: the model's, by name; from them come
        settings, and tensors that are plain attributes.
        """
        take_over_quantised(self.module, modules, tensors)
        own = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        wanted = own | buffers
        missing = sorted(wanted.keys() - tensors.keys())
        extra = sorted(tensors.keys() - wanted.keys())
        wrong = [n for n, t in wanted.items() if n in tensors and t.shape != tensors[n].shape]
        if missing or extra or wrong:
            raise UnsupportedModelError(
                f"the model's tensors are not those of its class {type(self.module).__name__}: "
                f"missing {missing[:4]}, unknown {extra[:4]}, other shape {wrong[:4]}. Give the plain model, without "
                "modules added or replaced; under FSDP1 with its wrapper, which holds the parameters"
            )
        for name in wanted:
            path, _, leaf = name.rpartition(".")
            module = self.module.get_submodule(path)
            registry = module._parameters if name in own else module._buffers
            registry[leaf] = tensors[name]
            self._places[name] = registry, leaf
        for path, module in self.module.named_modules():
            theirs = vars(modules[path]) if path in modules else {}
            is_split = "_is_expert_parallel" in theirs  # its settings are of this rank's experts alone
            for key, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(module, key, getattr(modules[path], key))
                elif not is_split and key not in _OF_THE_SHELL and is_setting(value):
                    setattr(module, key, self.settings.taken_over(path, theirs, key, value))
        self.stood_for = _keep_unscaled(self.module)
        self._base, self._tail, self._given = _split(self.module)
        self.text: Any = (
            self._base if self._base in self.decoder.modules() else self.decoder
        )  # Llama 4's decoder has a head
        self.has_wide_head = self._cast_to_wide_head()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it runs on now, by name, including those of layers that were replaced by fused ones."""
        return {name: registry[leaf] for name, (registry, leaf) in self._places.items()}

    def release(self) -> None:
        """Let go of the trainer's tensors."""
        for registry, leaf in self._places.values():
            registry[leaf] = None

    def _cast_to_wide_head(self) -> bool:
        """Where the head has a wider dtype than the layers (TRL's ``cast_lm_head_to_fp32``), cast its input; returns whether.

        The output of embeddings that are tied to the head is cast to the layers' dtype.
        """
        head, embeddings = self.module.get_output_embeddings(), self.module.get_input_embeddings()
        wide, numbers = head.weight.dtype, Counter[torch.dtype]()
        for parameter in self._base.parameters():
            if not is_packed(parameter) and parameter is not embeddings.weight and parameter.is_floating_point():
                numbers[parameter.dtype] += parameter.numel()
        # The dtype of most numbers counts: routers, say, may stay in fp32 among narrower layers.
        narrow = max(numbers, key=lambda dtype: numbers[dtype], default=wide)
        if narrow == wide or numbers.keys() - {wide} != {narrow} or torch.promote_types(wide, narrow) != wide:
            return False
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(wide),))
        embeddings.register_forward_hook(lambda _, inputs, output: output.to(narrow))
        return True

    @property
    def beside_text(self) -> list[str]:
        """Paths of the topmost modules of a multimodal model that no text goes through."""
        read = {*self.decoder.modules(), *self.module.get_output_embeddings().modules()}
        multimodal = self.decoder is not self.module.base_model
        paths: list[str] = []
        for path, module in self.module.named_modules() if multimodal else ():
            if read.isdisjoint(module.modules()) and not any(path.startswith(f"{p}.") for p in paths):
                paths.append(path)
        return paths

    @property
    def device(self) -> torch.device:
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight.device

    def layer_shapes(self) -> list[LayerShape]:
        """What each layer stores, found by running two tokens. Raises ``UnsupportedModelError`` where that does not work out."""
        probe = ShapeProbe()
        positions = torch.arange(2, device=self.device)
        tokens, name = torch.zeros_like(positions), type(self.module).__name__
        try:
            with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
                given = {"input_ids": tokens[None], "position_ids": positions[None]}
                with attending_by(self.module.config, PROBED), self.indexed.tried():
                    whole = self._run(self.module, given, positions, probe).logits[0]
                in_two = self.logits(self.hidden(tokens, positions, ShapeProbe()))
                with self._first_is_nan():
                    after_nan = self.logits(self.hidden(tokens, positions, ShapeProbe()))[1:]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: this is where an unknown architecture first meets the engine
            cause = str(error)
            if not isinstance(error, UnsupportedModelError):
                cause = (
                    "its code fails on the tokens of several sequences in one row, without masks, with "
                    f"{type(error).__name__}: {first_line(error)}"
                )
            raise UnsupportedModelError(
                f"{name} does not run in the engine ({cause}): use model.generate for it"
            ) from error
        if not probe.attended.keys() | probe.states.keys() <= {*range(self.num_layers)}:
            raise UnsupportedModelError(
                f"{name} has attention, or a state, that belongs to none of its {self.num_layers} layers: use model.generate for it"
            )
        shapes = probe.shapes(self.num_layers)
        self.same_keys = {i: shape.same_as for i, shape in enumerate(shapes) if shape.same_as is not None}
        check_masks(name, probe, self.max_model_len, self.device)
        if not any(shape.heads or shape.states for shape in shapes):
            raise UnsupportedModelError(
                f"{name} has no layer that attends through transformers' AttentionInterface, and none with a state that the "
                "engine knows: use model.generate for it"
            )
        if not torch.equal(after_nan.isnan(), whole[1:].isnan()):
            raise UnsupportedModelError(
                f"{name}: tokens depend on each other by more than attention through transformers' AttentionInterface and "
                "recurrences that the engine knows; layers with another state are not supported, use model.generate for them"
            )
        if not torch.allclose(whole, in_two, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise UnsupportedModelError(
                f"{name} does more than its base model and what turns hidden states into logits: use model.generate for it"
            )
        return shapes

    @contextmanager
    def _first_is_nan(self) -> Iterator[None]:
        """Context manager: the first token's embedding is NaN, and so is whatever depends on it, even if multiplied by zero."""

        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output.index_fill(1, torch.zeros(1, dtype=torch.long, device=output.device), torch.nan)

        hook = self.module.get_input_embeddings().register_forward_hook(spoil)
        try:
            yield
        finally:
            hook.remove()

    def logits_of(self, hidden: Tensor, index: Tensor | None, adapters: AdapterRows | None) -> Tensor:
        """Next-token logits of the tokens at ``index``, each with its adapter. Returns [R, V].

        hidden: [T, D]; index: int64 [R], or None for every token in order.
        """
        if index is not None:
            hidden = hidden.index_select(0, index)
            adapters = adapters.select(index) if adapters is not None and self.lora.has_hooks else None
        self.lora.rows = adapters if self.lora.has_hooks else None
        return self.logits(hidden)

    def _module_hidden(self, token_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        """The hidden states of all tokens, as ``logits`` takes them. token_ids, positions: int64 [T]. Returns [T, D]."""
        given = {"input_ids": token_ids[None], "position_ids": positions[None]}
        with self._placing(context):
            out = self._run(self._base, given, positions, context)
        self._given.output_type = type(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @contextmanager
    def _placing(self, context: Any) -> Iterator[None]:
        """Context manager: the language model gets embeddings and positions of images in place of their placeholders'."""
        images, rotary = context.images, context.rotary
        if images is None and rotary is None:
            yield
            return

        def place(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if rotary is not None:
                given["position_ids"] = rotary[None] if rotary.dim() == 1 else rotary[:, None]
            if images is not None:
                ids, embeddings = given.pop("input_ids", None), given.get("inputs_embeds")
                if embeddings is None:
                    embeddings = self.module.get_input_embeddings()(ids)
                given["inputs_embeds"] = embeddings.index_copy(
                    1, images.at, images.embeddings[None].to(embeddings.dtype)
                )
                if images.deep:
                    visual = embeddings.new_zeros(embeddings.shape[:2], dtype=torch.bool).index_fill(1, images.at, True)
                    given |= {"visual_pos_masks": visual, "deepstack_visual_embeds": images.deep}
            return args, given

        hook = self.text.register_forward_pre_hook(place, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _run(self, module: nn.Module, given: dict[str, Any], positions: Tensor, context: Any) -> Any:
        given = given | {cache_name(type(module).forward): PackedPositions(positions)}
        with self.recurrent.within(context):
            return module(**given, use_cache=False, stoker_context=context)

    def module_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, by the model's own head. hidden: [R, D], after the last norm. Returns [R, V] in the model's dtype."""
        logits: Tensor = self._tail(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def logits_through(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """As ``module_logits``, with another head in place of the model's. project: [R, D] to [R, V]."""
        head = self.module.get_output_embeddings()
        (name,) = (n for n, m in self.module.named_children() if m is head)
        tail: Any = copy.copy(self._tail)
        tail._modules = tail._modules | {name: _Head(project)}
        return lambda hidden: tail(inputs_embeds=hidden[None], use_cache=False).logits[0]


class _Undrawn(TorchFunctionMode):
    """Within, tensors without memory are not initialised, which would take most of the time of making modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class _GivenHiddenStates(nn.Module):
    """Stands in for a base model: outputs the hidden states that it is given."""

    output_type: Any = None  # class of the base model's output

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "base", base)  # not a child: its parameters have names already

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model's class reads from its base model, such as a multiplier of logits."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output_type(last_hidden_state=inputs_embeds)


class _Head(nn.Module):
    def __init__(self, project: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project = project

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(hidden[0])[None]


def _split(module: Any) -> tuple[nn.Module, nn.Module, _GivenHiddenStates]:
    """The base model, and the rest of the model: what its class does with hidden states (head, scales, softcaps).

    The rest is a second view of the same head and parameters, so that what is bound to the module is bound to it too.
    Raises ``UnsupportedModelError`` where no child holds all up to the head.
    """
    embeddings = module.get_input_embeddings()
    bases = [(n, m) for n, m in module.named_children() if m is not embeddings and embeddings in m.modules()]
    if len(bases) != 1:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no base model besides its head: use model.generate for it"
        )
    ((name, base),) = bases
    if module.get_output_embeddings() in base.modules():  # a text model within a model
        return _split(base)
    tail, given = copy.copy(module), _GivenHiddenStates(base)
    tail._modules = module._modules | {name: given}
    return base, tail, given


def _keep_unscaled(model: nn.Module) -> dict[str, str]:
    """Have rotary embeddings that depend on a batch's longest sequence use the frequencies of short sequences.

    The engine's sequences are all short (``check_length``). After a long batch of the trainer's its buffer has other
    frequencies, until its next forward, and the shell must not write to it. Returns, by the names of such buffers, those of
    the buffers that are bound in their place.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        kinds: Any = getattr(module, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        for layers, kind in of_layers.items():
            name, original = (f"{layers}_{n}" if layers else n for n in ("inv_freq", "original_inv_freq"))
            if kind in SCALED_BY_LENGTH and original in module._buffers:
                module._buffers[name] = module._buffers[original]
                found[f"{path}.{name}"] = f"{path}.{original}"
                of_layers = of_layers | {layers: "default"}  # so that its forward leaves them alone
        if of_layers not in (kinds, {None: kinds}):
            module.rope_type = of_layers if isinstance(kinds, dict) else of_layers[None]
    return found
