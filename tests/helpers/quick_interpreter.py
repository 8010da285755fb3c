"""Triton's interpreter without its work that has no effect: with kernels as small as in tests, that is most of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
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

        quick = owner is tl.tensor and name in _OPERATORS
        scope.set_attr(owner, name, _operator(name, interpreted) if quick else interpreted)

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
    _remember_masks()
    _skip_what_changes_nothing()
    _unwrap_first_what_is_mostly_given()
    _take_arguments_as_they_are()


# Of numbers: what numpy does, whether it gives truth values, and whether the operands are the other way around.
_OPERATORS = {
    "__add__": (np.add, False, False),
    "__radd__": (np.add, False, True),
    "__sub__": (np.subtract, False, False),
    "__rsub__": (np.subtract, False, True),
    "__mul__": (np.multiply, False, False),
    "__rmul__": (np.multiply, False, True),
    "__and__": (np.bitwise_and, False, False),
    "__or__": (np.bitwise_or, False, False),
    "__lt__": (np.less, True, False),
    "__le__": (np.less_equal, True, False),
    "__gt__": (np.greater, True, False),
    "__ge__": (np.greater_equal, True, False),
    "__eq__": (np.equal, True, False),
    "__ne__": (np.not_equal, True, False),
}


def _operator(name: str, thorough: Callable[..., Any]) -> Callable[..., Any]:
    """Between tensors of one type or integers of two, or one and a number of its kind; also where a pointer points further."""
    compute, compares, reverse = _OPERATORS[name]
    kinds = (tl.int1, tl.int32, tl.int64) if name in ("__and__", "__or__") else (tl.float32, tl.int32, tl.int64)
    adds, integers = name == "__add__", (tl.int32, tl.int64)
    tensor, handle, pointer = tl.tensor, interpreter.TensorHandle, tl.pointer_type

    def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
        dtype, kind, like = self.dtype, type(other), self.type
        if kind is tl.constexpr:
            other, kind = other.value, type(other.value)
        if dtype is kinds[0] or dtype is kinds[1] or dtype is kinds[2]:
            if kind is tensor and other.dtype is dtype:
                like, right = _type_of_both(like, other.type), other.handle.data
            elif kind is tensor and dtype in integers and other.dtype in integers:
                like, right, dtype = _type_of_both(like, other.type), other.handle.data, tl.int64
                like = None if like is None else like.with_element_ty(dtype)
            elif kind is int and -(2**31) < other < 2**31 and dtype is not tl.int1:
                right = other
            elif kind is float and dtype is tl.float32 and abs(other) < 2**127:
                right = other + 0.0  # no negative zero: constants have none
            else:
                return thorough(self, other)
            if like is not None:
                left = self.handle
                data = compute(right, left.data) if reverse else compute(left.data, right)
                return tensor(
                    handle(data, left.dtype if dtype is self.dtype else dtype),
                    like.with_element_ty(tl.int1) if compares else like,
                )
        elif (
            adds and type(dtype) is pointer and kind is tensor and (other.dtype is tl.int32 or other.dtype is tl.int64)
        ):
            like, ends = _type_of_both(like, other.type), self.handle
            if like is not None:
                width = max(1, dtype.element_ty.primitive_bitwidth // 8)
                offsets = other.handle.data.astype(np.uint64)
                return tensor(handle(ends.data + (offsets if width == 1 else width * offsets), ends.dtype), like)
        return thorough(self, other)

    operate.thorough = thorough  # type: ignore[attr-defined]
    return operate


def _type_of_both(one: Any, other: Any) -> Any:
    """That of the first, in the shape of both together; None where more has to be looked at."""
    if other.__class__ is not tl.block_type:
        return one
    shape = other.shape.values
    if one.__class__ is not tl.block_type:
        return tl.block_type(one, shape)
    own = one.shape.values
    if own == shape:
        return one
    if len(own) != len(shape) or any(a != b and a != 1 and b != 1 for a, b in zip(own, shape, strict=True)):
        return None
    return tl.block_type(one.element_ty, [max(a, b) for a, b in zip(own, shape, strict=True)])


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


def _remember_masks() -> None:
    """Of loads that have none, with what is loaded where they mask something out, which nothing may write to either."""
    masks = dict[tuple[int, ...], Any]()

    def create_load(self: Any, pointers: Any, _0: Any, _1: Any, is_volatile: bool) -> Any:
        shape = pointers.data.shape
        if shape not in masks:
            masks[shape] = interpreter.TensorHandle(np.ones(shape, np.bool_), tl.int1)
            masks[shape].data.flags.writeable = False
        return self.create_masked_load(pointers, masks[shape], None, _0, _1, is_volatile)

    interpreter.InterpreterBuilder.create_load = create_load


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
