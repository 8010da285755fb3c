"""Triton's interpreter without its work that has no effect: with kernels as small as in tests, that is most of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """Once in a process, in which kernels are interpreted and never compiled."""
    builder, patch_lang, done = interpreter.interpreter_builder, interpreter._patch_lang, set[int]()

    def patch_once(fn: Callable[..., Any]) -> Any:
        """Puts interpreted functions in place of the language's, which Triton repeats whenever a kernel calls a helper."""
        if id(fn.__globals__) not in done:
            done.add(id(fn.__globals__))
            patch_lang(fn)
        return interpreter._LangPatchScope()  # of no changes: they stay

    def patch_attr(owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        """Calls what the language itself wraps, in a check for the argument that is added here."""
        own = inspect.unwrap(member)

        def interpreted(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return own(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        scope.set_attr(owner, name, interpreted)

    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_once(kind: Any) -> Any:
        """Looks up in a table that Triton builds anew at each call."""
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    interpreter._patch_attr = patch_attr
    # It computes sums and products of integers twice, to see whether they overflow, and looks at that in debug mode only.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_widths()
    _remember_shapes()
    _remember_constants()
    _skip_what_changes_nothing()
    _unwrap_first_what_is_mostly_given()
    _take_arguments_as_they_are()


def _remember_widths() -> None:
    """Of the types of numbers: each result is checked for being no wider than its type."""
    handle, check, most = interpreter.TensorHandle, interpreter.TensorHandle.__post_init__, dict[str, float]()

    def made(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        name = dtype.name
        if name not in most:
            most[name] = float("inf") if dtype.is_ptr() else max(8, dtype.primitive_bitwidth) // 8
        if data.itemsize > most[name]:
            check(self)

    handle.__init__ = made


def _remember_shapes() -> None:
    """Of tensors and their types, each of which would make an object of every size, and of the type of every size."""
    make_tensor, of_tensors = tl.tensor.__init__, dict[tuple[int, ...], dict[str, Any]]()

    @wraps(make_tensor)
    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.__class__ is tl.block_type else ()
        if shape not in of_tensors:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            of_tensors[shape] = {name: value for name, value in vars(self).items() if name not in own}
        else:
            self.__dict__.update(of_tensors[shape])
            self.handle, self.type, self.dtype = handle, type, type.scalar

    make_type, of_types = tl.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    @wraps(make_type)
    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is tl.tuple else shape
        key = (element_ty.name, *[size if type(size) is int else tl.core._unwrap_if_constexpr(size) for size in sizes])
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            self.__dict__.update(of_types[key])
            self.element_ty = element_ty

    tl.tensor.__init__, tl.block_type.__init__ = tensor, block_type
    tl.block_type.to_ir = lambda self, builder: self  # as what the interpreter makes of it again is


def _remember_constants() -> None:
    """Arrays of one number, which nothing may write to."""
    constant, made = tl.semantic.TritonSemantic.scalar_constant, dict[tuple[Any, ...], Any]()

    @wraps(constant)
    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in made:
            made[key] = constant(self, value, dtype).handle
            made[key].data.flags.writeable = False
        return self.tensor(interpreter.TensorHandle(made[key].data, made[key].dtype), dtype)

    tl.semantic.TritonSemantic.scalar_constant = scalar_constant


def _unwrap_first_what_is_mostly_given() -> None:
    """Most of what a constant may be wrapped around is none, which Triton finds out last."""
    unwrap = tl.core._unwrap_if_constexpr

    def unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        if kind is tl.tensor or kind is int or o is None:
            return o
        return o.value if kind is tl.constexpr else unwrap(o)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr


def _take_arguments_as_they_are() -> None:
    """They are the host's already. Triton would make another tensor of each, and copy all memory of all onto itself."""
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda self, args, args_hst, kwargs, kwargs_hst: None


def _skip_what_changes_nothing() -> None:
    """Conversions to the type and broadcasts to the shape that there are already, which are found out last."""
    semantic = tl.semantic.TritonSemantic
    convert = semantic.cast
    broadcast, check, equal = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl, tl.dtype.__eq__

    def alike(one: Any, other: Any) -> bool:
        if one is other:
            return True
        if not one.is_block() or not other.is_block():
            return not one.is_block() and not other.is_block()
        return bool(one.shape.values == other.shape.values)

    def fits(number: Any, dtype: Any) -> bool:
        if type(number) is int:
            return abs(number) < 2**31 and (dtype is tl.int32 or dtype is tl.int64 or dtype is tl.float32)
        return type(number) is float and dtype is tl.float32

    def to(self: Any, tensor: Any, shape: list[int]) -> Any:
        return self.tensor(self.builder.create_broadcast(tensor.handle, shape), tl.block_type(tensor.dtype, shape))

    @wraps(convert)
    def cast(self: Any, input: Any, dst_ty: Any, *more: Any, **options: Any) -> Any:
        return input if input.dtype is dst_ty.scalar else convert(self, input, dst_ty, *more, **options)

    @wraps(broadcast)
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if alike(lhs.type, rhs.type):
            return lhs, rhs
        if lhs.type.is_block() and rhs.type.is_block():
            one, other = lhs.type.shape.values, rhs.type.shape.values
            shape = [b if a == 1 else a for a, b in zip(one, other, strict=False)]
            if len(one) == len(other) and all(b in (1, size) for b, size in zip(other, shape, strict=True)):
                return tuple(each if each.type.shape.values == shape else to(self, each, shape) for each in (lhs, rhs))
        return broadcast(self, lhs, rhs)

    @wraps(check)
    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *more: Any, **options: Any) -> Any:
        """A quotient or a pointer is not as its operands are; a number becomes what the tensor is of."""
        one, other = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if options or len(more) > 2 or not (one or other):
            return check(self, lhs, rhs, *more, **options)
        if one and other:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return (lhs, rhs) if alike(lhs.type, rhs.type) else self.broadcast_impl_value(lhs, rhs)
            if lhs.dtype.is_ptr() and more[:1] == (True,) and (rhs.dtype is tl.int32 or rhs.dtype is tl.int64):
                return self.broadcast_impl_value(lhs, rhs)
        elif one and fits(rhs, lhs.dtype):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif other and fits(lhs, rhs.dtype):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, *more, **options)

    @wraps(equal)
    def equal_dtypes(self: Any, other: Any) -> bool:
        return self is other or bool(equal(self, other))

    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = (
        broadcast_impl_value,
        binary_op_type_checking_impl,
    )
    semantic.cast, tl.dtype.__eq__ = cast, equal_dtypes
