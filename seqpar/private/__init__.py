"""Other libraries' private names, in one file for each library: a release that changes one breaks here.

A name is looked up at its first use, so a library is imported when it is needed, and one that lacks a name serves all
that does without. No other file of seqpar says a private name of another library (`tests/private/test_names.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any


class PrivateNames:
    """A library's private names, as attributes without the leading underscore.

    library: its distribution. tested: the releases that have all names. scope: of the module that lists them, whose
    attributes they become. places: module, or "module:name" -> names in it, in one string; "ours=_theirs"
    is another name here. attributes: of objects.
    """

    def __init__(self, library: str, tested: str, scope: dict[str, Any], places: Mapping[str, str]) -> None:
        self.library, self.tested, self._scope, self.attributes = library, tested, scope, list[str]()
        self.paths = dict[str, str]()
        for place, names in places.items():
            for ours, _, name in (each.rpartition("=") for each in names.split()):
                self.paths[ours or name.lstrip("_")] = f"{place}{'.' if ':' in place else ':'}{name}"

    def __getattr__(self, name: str) -> Any:
        """The first use of a name; later ones find the attribute.

        Raises: ImportError for a name that the installed library does not have.
        """
        if name not in self.paths:
            raise AttributeError(f"module {self._scope['__name__']!r} has no attribute {name!r}")
        try:
            found = resolve_name(self.paths[name])
        except (AttributeError, ModuleNotFoundError) as error:
            raise self.missing(self.paths[name].replace(":", ".")) from error
        self.__dict__[name] = self._scope[name] = found
        return found

    def attribute(self, name: str) -> Callable[..., Any]:
        """A function of an object that reads its private attribute; with a second argument, that where it has none."""
        self.key(name)

        def read(x: Any, *default: Any) -> Any:
            try:
                return getattr(x, name, *default)
            except AttributeError as error:
                raise self.missing(f"{getattr(x, '__name__', type(x).__name__)}.{name}") from error

        return read

    def key(self, name: str) -> str:
        """The name of a private attribute, for what sets it."""
        self.attributes.append(name)
        return name

    def missing(self, name: str) -> ImportError:
        """The error for a name that the installed library does not have."""
        try:
            installed = version(self.library)
        except PackageNotFoundError:
            installed = "(not installed)"
        return ImportError(
            f"{self.library} {installed} has no {name}, which seqpar needs here; install {self.library} {self.tested}, "
            "or a later seqpar"
        )
