"""What a class does that was typed into a shell, where no file has its text."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__")


def code_of(cls: type) -> str:
    """Equal for the same code in another process, another text for another one.

    What counts is the code of the class, and of all that it names of the module it was typed into:
    bases, functions, classes and plain values.
    """
    told: list[str] = []
    _tell(cls, cls.__module__, told, set())
    return "\n".join(told)


def _tell(one: Any, module: str, told: list[str], seen: set[int]) -> None:
    if isinstance(one, _PLAIN):
        told.append(repr(one))
        return
    if id(one) in seen:
        return
    seen.add(id(one))
    parts: list[Any]
    if isinstance(one, type):
        told.append(one.__qualname__)
        parts = [base for base in one.__mro__[1:] if base.__module__ == module]
        for name, value in sorted(vars(one).items()):
            if name not in _OF_PYTHON:
                parts += [name, value]
    elif isinstance(one, FunctionType):
        _tell_code(one.__code__, told)
        named = (one.__globals__.get(name) for name in _names(one.__code__))
        parts = [value for value in named if _is_of(value, module)]
        parts += [one.__defaults__, *(one.__kwdefaults__ or {}).values()]
        parts += [cell.cell_contents for cell in one.__closure__ or ()]
    elif isinstance(one, property):
        parts = [one.fget, one.fset]
    else:  # static and class methods, what decorators made; else its kind alone
        told.append(type(one).__qualname__)
        parts = [getattr(one, "__func__", None), getattr(one, "__wrapped__", None)]
    for part in parts:
        _tell(part, module, told, seen)


def _tell_code(code: CodeType, told: list[str]) -> None:
    told += [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _tell_code(constant, told)
        else:  # sets have no order of their own
            plain = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
            told.append(repr(plain))


def _names(code: CodeType) -> list[str]:
    """Those that it looks up, in what is defined within it, too."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return [*code.co_names, *(name for one in inner for name in _names(one))]


def _is_of(value: Any, module: str) -> bool:
    kinds = (type, FunctionType)
    return isinstance(value, _PLAIN) or isinstance(value, kinds) and value.__module__ == module
