"""The user's own code: resolves an import path and checks the object against a Protocol at start-up."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.schemas.config import ConfigError, Plug

F = TypeVar("F", bound=Callable[..., Any])


def offers(*names: str) -> Callable[[F], F]:
    """Marks a Protocol's method with optional keyword arguments, passed if an implementation has such parameters."""

    def mark(method: F) -> F:
        method.offered = frozenset(names)  # type: ignore[attr-defined]
        return method

    return mark


def resolve(plug: Plug, field: str) -> Any:
    """Returns the object that `plug.path` names.

    Raises:
        ConfigError: no such module or name; the message names the part that failed.
    """
    module_name, _, name = plug.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{field}.path = {plug.path!r}: cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        own = (each for each, found in vars(module).items() if getattr(found, "__module__", "") == module.__name__)
        public = ", ".join(each for each in own if not each.startswith("_"))
        defined = f"; it defines {public}" if public else ""
        raise ConfigError(f"{field}.path = {plug.path!r}: module {module_name!r} has no {name!r}{defined}") from None


def construct(plug: Plug, field: str, protocol: type, **context: Any) -> Any:
    """Calls the named class or factory with the plug's arguments and `context`, and checks what it returns.

    Raises:
        ConfigError: it cannot be called with these arguments, or the result lacks a method of `protocol`.
    """
    factory = resolve(plug, field)
    try:
        inspect.signature(factory).bind(**plug.kwargs, **context)
    except ValueError:
        raise ConfigError(
            f"{field}.path = {plug.path!r}: its signature cannot be read; expected a class or function"
        ) from None
    except TypeError as error:
        raise ConfigError(f"{field}.kwargs = {plug.kwargs!r}: {plug.path} refuses them: {error}") from None
    try:
        built = factory(**plug.kwargs, **context)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{field}: {plug.path}: {error}") from error
    check_protocol(built, protocol, field, plug.path)
    return built


def check_protocol(built: object, protocol: type, field: str, path: str) -> None:
    """Raises ConfigError, with the expected signature, unless `built` has the methods and attributes of `protocol`."""
    for name, expected in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        found = getattr(built, name, None)
        if not callable(found):
            raise ConfigError(f"{field}.path = {path!r}: lacks a method; expected {_show(protocol, name, expected)}")
        wanted = [p for p in inspect.signature(expected).parameters.values() if p.name != "self"]
        try:
            signature = inspect.signature(found)
            offered = dict.fromkeys(getattr(expected, "offered", frozenset()) & signature.parameters.keys())
            signature.bind(*[None for p in wanted if p.kind is not p.KEYWORD_ONLY], **offered)
        except TypeError:
            raise ConfigError(
                f"{field}.path = {path!r}: {name}{inspect.signature(found)} does not fit; "
                f"expected {_show(protocol, name, expected)}"
            ) from None
    for name in getattr(protocol, "__annotations__", {}):
        if not hasattr(built, name):
            raise ConfigError(f"{field}.path = {path!r}: lacks the attribute {name!r} of {protocol.__name__}")


def _show(protocol: type, name: str, function: Any) -> str:
    return f"{protocol.__name__}.{name}{inspect.signature(function)}"
