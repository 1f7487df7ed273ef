"""The user's own code: resolves an import path and checks the object against a Protocol at start-up."""

import asyncio
import importlib
import importlib.util
import inspect
import operator
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType
from typing import Any, TypeVar

from penstock.schemas.config import ConfigError, Plug
from penstock.schemas.rollout import one_line, shown_error

F = TypeVar("F", bound=Callable[..., Any])
_MISSING = object()
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def ends_caller(error: BaseException) -> bool:
    """Returns whether an exception that the user's code let out is to end its caller: the cancellation of the running
    task, or Ctrl-C. Anything else is that code's own failure, whatever its class: `sys.exit()`, a panic in Rust, the
    cancellation of a future that it awaited, or a KeyboardInterrupt where the event loop handles the signal."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):  # after `add_signal_handler` the signal raises none
        return getattr(signal.getsignal(signal.SIGINT), "__module__", "") != "asyncio.unix_events"
    return isinstance(error, GeneratorExit)


def offers(*names: str, coroutine: bool = False) -> Callable[[F], F]:
    """Marks a Protocol's method with optional keyword arguments, passed if an implementation has such parameters.
    coroutine: an implementation may be an `async def`."""

    def mark(method: F) -> F:
        method.offered = frozenset(names)  # type: ignore[attr-defined]
        method.may_be_coroutine = coroutine  # type: ignore[attr-defined]
        return method

    return mark


def resolve(plug: Plug, field: str) -> Any:
    """Returns the object that `plug.path` names.

    Raises:
        ConfigError: no import path, no such module or name, or the module raises; the message names the part that
            failed, and the line of the user's code.
    """
    module_name, _, name = plug.path.partition(":")
    if not name or not all(module_name.split(".")) or "/" in module_name or module_name.endswith(".py"):
        raise ConfigError(
            f"{field}.path = {plug.path!r}: no import path; expected 'module:Name', as in 'my_lab:Capitals' for a file "
            "my_lab.py in the working directory or in a folder of PYTHONPATH"
        )
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # the module is the user's, and may raise anything
        if ends_caller(error):
            raise
        text = str(error) if type(error) in (ImportError, ModuleNotFoundError) else shown_error(error)
        if isinstance(error, SyntaxError):
            text = f"{type(error).__name__}: {error.msg}"
        place = place_in(error, plug) or _file_of(module_name)
        raise ConfigError(f"{field}.path = {plug.path!r}: cannot import {module_name!r}: {text}{place}") from error
    found = read_attribute(module, name, field, plug.path, default=_MISSING)
    if found is _MISSING:
        kinds = [(each, value) for each, value in vars(module).items() if isinstance(value, type | FunctionType)]
        public = [each for each, value in kinds if value.__module__ == module.__name__ and not each.startswith("_")]
        defined = f"; it defines {', '.join(public)}" if public else ""
        raise ConfigError(f"{field}.path = {plug.path!r}: module {module_name!r} has no {name!r}{defined}")
    return found


def construct(plug: Plug, field: str, protocol: type, **context: Any) -> Any:
    """Calls the named class or factory with the plug's arguments and `context`, and checks what it returns.

    Raises:
        ConfigError: it cannot be called with these arguments, it raises, or the result lacks a method of `protocol`.
    """
    factory = resolve(plug, field)
    made_by = inspect.getattr_static(factory, "__init__", None) if isinstance(factory, type) else factory
    if not callable(factory) or inspect.iscoroutinefunction(made_by):
        kind = "an async def" if callable(factory) else f"an object of class {type(factory).__name__}"
        raise ConfigError(
            f"{field}.path = {plug.path!r}: {kind}; expected a class, or a function that returns one's "
            f"object{definition(made_by)}"
        )
    try:
        inspect.signature(factory).bind(**plug.kwargs, **context)
    except TypeError as error:
        raise ConfigError(
            f"{field}.kwargs = {plug.kwargs!r}: {plug.path} refuses them: {error}{definition(factory)}"
        ) from None
    except Exception as error:  # a builtin without a signature, or a metaclass of the user's
        raise ConfigError(
            f"{field}.path = {plug.path!r}: its signature cannot be read; expected a class or function"
            f"{place_in(error, plug)}"
        ) from error
    try:
        built = factory(**plug.kwargs, **context)
    except BaseException as error:  # the code is the user's, and may raise anything
        if ends_caller(error):
            raise
        is_message = isinstance(error, ConfigError | ValueError) and str(error)
        text = one_line(str(error)) if is_message else shown_error(error)
        place = place_in(error, plug) or definition(factory)
        raise ConfigError(f"{field}: {plug.path}: {text}{place}") from error
    check_protocol(built, protocol, field, plug.path)
    return built


def check_protocol(built: object, protocol: type, field: str, path: str) -> None:
    """Raises ConfigError unless `built` has the methods, with their signatures, and the attributes of `protocol`."""
    for name, expected in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        method = read_attribute(built, name, field, path)
        if not callable(method):
            raise ConfigError(
                f"{field}.path = {path!r}: lacks a method; expected {_show(protocol, name, expected)}"
                f"{definition(_named(path))}"
            )
        _check_signature(method, expected, f"{field}.path = {path!r}: {name}", _show(protocol, name, expected))
    for name, kind in getattr(protocol, "__annotations__", {}).items():
        value = read_attribute(built, name, field, path, default=_MISSING)
        if value is _MISSING:
            raise ConfigError(
                f"{field}.path = {path!r}: lacks the attribute {name!r} of {protocol.__name__}"
                f"{definition(_named(path))}"
            )
        if kind is int and not is_whole(value):
            raise ConfigError(
                f"{field}.path = {path!r}: {name} = {shown_value(value)}, expected a whole number"
                f"{definition(_named(path))}"
            )


def _check_signature(method: Callable[..., Any], expected: Any, named: str, shown: str) -> None:
    may_be_coroutine = inspect.iscoroutinefunction(expected) or getattr(expected, "may_be_coroutine", False)
    if not may_be_coroutine and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        raise ConfigError(f"{named} is an async def, which nobody awaits; expected {shown}{definition(method)}")
    called = (inspect.unwrap(method), type(method).__call__)
    if inspect.iscoroutinefunction(expected) and not any(map(inspect.iscoroutinefunction, called)):
        raise ConfigError(f"{named} is no async def, and is awaited; expected {shown}{definition(method)}")
    wanted = [p for p in inspect.signature(expected).parameters.values() if p.name != "self"]
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        offered = dict.fromkeys(getattr(expected, "offered", frozenset()) & signature.parameters.keys())
        signature.bind(*[None for p in wanted if p.kind is not p.KEYWORD_ONLY], **offered)
    except TypeError:
        raise ConfigError(f"{named}{signature} does not fit; expected {shown}{definition(method)}") from None


def read_attribute(owner: object, name: str, field: str, path: str, default: Any = None) -> Any:
    """Returns an attribute of the user's object, or `default` if it has none.

    Raises:
        ConfigError: reading it raises, as a property may.
    """
    try:
        return getattr(owner, name)
    except BaseException as error:  # the code is the user's, and may raise anything
        if ends_caller(error):
            raise
        if isinstance(error, AttributeError) and not any(name in vars(each) for each in type(owner).__mro__):
            return default
        place = place_in(error, Plug(path=path))
        raise ConfigError(f"{field}.path = {path!r}: reading {name} raises {shown_error(error)}{place}") from error


def is_whole(value: Any) -> bool:
    """Returns whether it is an integer of any library, and no boolean."""
    try:
        operator.index(value)
    except Exception:  # the class may be the user's
        return False
    return not isinstance(value, bool)


def shown_value(value: object) -> str:
    """Returns the `repr` of a value in one short line."""
    try:
        return one_line(repr(value))[:80]
    except Exception:  # the class may be the user's
        return f"an object of class {type(value).__name__}"


def definition(code: Any) -> str:
    """Returns the place of a class or function as ` (file:line)`; empty for one without source."""
    try:
        _, line = inspect.getsourcelines(code)
        return f" ({inspect.getsourcefile(code)}:{line})"
    except Exception:  # no source, one that is no text, or a class that hides it
        return ""


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(sys.modules.get(module), name, None)


def _file_of(module_name: str) -> str:
    """Returns the file of a module that cannot be compiled, after a space; empty if it is not found."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return ""
    return f" ({spec.origin})" if spec is not None and spec.origin is not None else ""


def user_place(frames: Iterable[tuple[FrameType, int]], root: str = "") -> str:
    """Returns file, line and function of the innermost frame of the user's code as `(file:line, in function)`; empty
    without one.

    frames: with their lines, the innermost first. root: the user's top-level package, which may be an installed one.
    """
    for frame, line in frames:
        package, path = str(frame.f_globals.get("__name__", "")).partition(".")[0], frame.f_code.co_filename
        is_theirs = package == root or not path.startswith(("<", *_LIBRARIES))
        if is_theirs and package != __name__.partition(".")[0]:
            return f"({path}:{line}, in {frame.f_code.co_name})"
    return ""


def place_in(error: BaseException, plug: Plug | None = None) -> str:
    """Returns the place of the code of `plug` in which an error was raised, after a space; empty without one."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" ({error.filename}:{error.lineno})"
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    place = user_place(frames, plug.path.partition(":")[0].partition(".")[0] if plug else "")
    return f" {place}" if place else ""


def _show(protocol: type, name: str, function: Any) -> str:
    return f"{protocol.__name__}.{name}{inspect.signature(function)}"
