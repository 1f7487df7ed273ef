"""The user's own code: resolves an import path and checks the object against a Protocol at start-up."""

import asyncio
import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

from penstock.schemas.config import ConfigError, Plug
from penstock.schemas.rollout import shown_error

F = TypeVar("F", bound=Callable[..., Any])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def ends_caller(error: BaseException) -> bool:
    """Returns whether an exception that the user's code let out is to end its caller: the cancellation of the running
    task, or Ctrl-C. Anything else is that code's own failure, whatever its class: `sys.exit()`, a panic in Rust, or
    the cancellation of a future that it awaited."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def offers(*names: str) -> Callable[[F], F]:
    """Marks a Protocol's method with optional keyword arguments, passed if an implementation has such parameters."""

    def mark(method: F) -> F:
        method.offered = frozenset(names)  # type: ignore[attr-defined]
        return method

    return mark


def resolve(plug: Plug, field: str) -> Any:
    """Returns the object that `plug.path` names.

    Raises:
        ConfigError: no such module or name, or the module raises; the message names the part that failed, and the line
            of the user's code.
    """
    module_name, _, name = plug.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # the module is the user's, and may raise anything
        if ends_caller(error):
            raise
        text = str(error) if type(error) in (ImportError, ModuleNotFoundError) else shown_error(error)
        if isinstance(error, SyntaxError):
            text = f"{type(error).__name__}: {error.msg}"
        raise ConfigError(
            f"{field}.path = {plug.path!r}: cannot import {module_name!r}: {text}{_place(error, plug)}"
        ) from error
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
        ConfigError: it cannot be called with these arguments, it raises, or the result lacks a method of `protocol`.
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
    except BaseException as error:  # the code is the user's, and may raise anything
        if ends_caller(error):
            raise
        text = str(error) if isinstance(error, ConfigError | ValueError) else shown_error(error)
        raise ConfigError(f"{field}: {plug.path}: {text}{_place(error, plug)}") from error
    check_protocol(built, protocol, field, plug.path)
    return built


def check_protocol(built: object, protocol: type, field: str, path: str) -> None:
    """Raises ConfigError unless `built` has the methods, with their signatures, and the attributes of `protocol`."""
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
    for name, kind in getattr(protocol, "__annotations__", {}).items():
        if not hasattr(built, name):
            raise ConfigError(f"{field}.path = {path!r}: lacks the attribute {name!r} of {protocol.__name__}")
        if kind is int and not is_whole(value := getattr(built, name)):
            raise ConfigError(f"{field}.path = {path!r}: {name} = {repr(value)[:80]}, expected a whole number")


def is_whole(value: Any) -> bool:
    """Returns whether it is an integer of any library, and no boolean."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


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


def _place(error: BaseException, plug: Plug) -> str:
    """Returns the place of the user's code in which an error was raised, after a space; empty without one."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" ({error.filename}:{error.lineno})"
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    place = user_place(frames, plug.path.partition(":")[0].partition(".")[0])
    return f" {place}" if place else ""


def _show(protocol: type, name: str, function: Any) -> str:
    return f"{protocol.__name__}.{name}{inspect.signature(function)}"
