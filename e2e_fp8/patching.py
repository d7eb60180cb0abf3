"""Replace single functions of installed packages, each with a reason, a version range and a check of the source it replaces.

A patch names the module attribute it replaces and the SHA-256 of the upstream source it was written against. If the installed
source differs, applying it is an error that names the patch and the installed version: nobody reviewed that combination.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from e2e_fp8.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced function.

    Example: ``Patch(name="a", target="pkg.mod:function", distribution="pkg", versions=("1.0",), reason="...", upstream="...",
    remove_when="...", source_sha256="...", replacement=fn)``.
    """

    name: str
    target: str
    """``package.module:attribute``, the attribute being a function or class of that module, or ``Class.method``."""
    also_bound_in: tuple[str, ...] = ()
    """Modules that imported the same function by name and hold their own reference."""
    distribution: str
    versions: tuple[str, ...]
    """Versions of ``distribution`` the patch was reviewed against."""
    reason: str
    upstream: str
    """Issue or pull request upstream, or where the fault is if none is filed."""
    remove_when: str
    source_sha256: str
    """SHA-256 of ``inspect.getsource`` of what is replaced, UTF-8."""
    replacement: Callable[..., Any]


_originals: dict[str, Callable[..., Any]] = {}


def source_sha256(function: Callable[..., Any]) -> str:
    """Hex SHA-256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def _split(target: str) -> tuple[Any, str]:
    module_name, path = target.split(":")
    holder = importlib.import_module(module_name)
    *owners, attribute = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    return holder, attribute


def _holders(patch: Patch) -> list[tuple[Any, str]]:
    module, attribute = _split(patch.target)
    return [(module, attribute), *((importlib.import_module(name), attribute) for name in patch.also_bound_in)]


def apply_once(patch: Patch) -> bool:
    """Put the replacement in place; False if it already was.

    Raises:
        ConfigError: the installed version is not one the patch was reviewed against, or its source differs.
    """
    module, attribute = _split(patch.target)
    current = getattr(module, attribute)
    if current is patch.replacement:
        return False
    installed = importlib.metadata.version(patch.distribution)
    if installed not in patch.versions:
        raise ConfigError(
            f"Patch {patch.name} was reviewed for {patch.distribution} {', '.join(patch.versions)}, but {installed} is installed. "
            f"Install a listed version, or review {patch.target} and extend the patch."
        )
    found = source_sha256(current)
    if found != patch.source_sha256:
        raise ConfigError(
            f"Patch {patch.name} replaces {patch.target}, whose source in {patch.distribution} {installed} is not the one reviewed "
            f"(SHA-256 {found[:12]}, expected {patch.source_sha256[:12]}). Reinstall {patch.distribution} {patch.versions[-1]}."
        )
    _originals[patch.name] = current
    for holder, name in _holders(patch):
        setattr(holder, name, patch.replacement)
    return True


def apply_all(patches: Iterable[Patch]) -> None:
    """``apply_once`` for each patch, then ``verify_live`` for each."""
    listed = tuple(patches)
    for patch in listed:
        apply_once(patch)
    for patch in listed:
        verify_live(patch)


def verify_live(patch: Patch) -> None:
    """Check that every module that holds the function holds the replacement.

    Raises:
        ConfigError: some module still holds another function, for instance because it was reloaded.
    """
    for holder, name in _holders(patch):
        if getattr(holder, name) is not patch.replacement:
            raise ConfigError(f"Patch {patch.name} is not in effect in {holder.__name__}.{name}: apply it before building the engine.")


def revert(patch: Patch) -> None:
    """Put the original back; no effect if the patch is not applied."""
    original = _originals.pop(patch.name, None)
    if original is not None:
        for holder, name in _holders(patch):
            setattr(holder, name, original)
