"""Model classes as transformers writes them, also where Liger has put its kernels into them.

With ``use_liger_kernel``, norms, MLPs, experts and rotary embeddings in transformers' own modules are Liger's, and so are those of
every model that is built later. They compute the same, but they only run on a GPU, and the engine has kernels of its own for
what they fuse. So the engine's model is built from another copy of the module, which nobody has changed.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stoker.engine.supported_models import decoder_of
from stoker.kernels.errors import UnsupportedModelError


def build(kind: type[nn.Module], config: Any) -> Any:
    """A model of that class, all of whose parts are as they are written.

    Raises ``UnsupportedModelError`` where parts are still Liger's: those of a class derived from transformers', say.
    """
    model = as_written(kind)(config)
    for path, part in list(model.named_modules()):
        # Multimodal models find their text model by its configuration.
        if isinstance(part, PreTrainedModel) and (plain := as_written(type(part))) is not type(part):
            model.set_submodule(path, plain(part.config))
    if left := sorted({type(part).__name__ for part in decoder_of(model).modules() if _is_ligers(type(part))}):
        raise UnsupportedModelError(
            f"{kind.__name__} is built of Liger's modules ({', '.join(left)}), which the engine does not run: build the engine, or "
            "attach it, before Liger changes the class, or switch it off (use_liger_kernel=False)"
        )
    return model


def as_written(kind: type[nn.Module]) -> type[Any]:
    """The class itself; or where its module has parts of Liger's, the same class of a copy that has none."""
    if not kind.__module__.startswith("transformers."):  # a script of the user's, say, which must not run again
        return kind
    module = sys.modules[kind.__module__]
    if not any(map(_has_ligers, vars(module).values())):
        return kind
    name = f"{kind.__module__}_as_written"  # some of transformers looks classes up by the names of their modules
    if name not in sys.modules:
        assert module.__file__ is not None
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    found: type[Any] = getattr(sys.modules[name], kind.__name__)
    return found


def _has_ligers(value: Any) -> bool:
    """Whether something in a module is Liger's, or a class whose forward is."""
    return _is_ligers(value) or (isinstance(value, type) and _is_ligers(vars(value).get("forward")))


def _is_ligers(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "liger_kernel"
