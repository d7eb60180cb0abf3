"""Files of one checkpoint folder, see :mod:`e2e_fp8.orchestration.checkpoint`: written once, named by digest in the manifest."""

import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from e2e_fp8.errors import CheckpointError

FORMAT = 2
SHARD_BYTES = 1 << 30
NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "the file size limit is reached"}
Files = dict[str, dict[str, Any]]
"""sha256 and size of each file by name."""


class DamagedError(Exception):
    """One file of a checkpoint is not what the manifest says."""


def encode(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON form of ``node``; tensors go into ``tensors`` under keys joined with ``/`` (``~`` and ``/`` escaped as in RFC 6901)."""
    if isinstance(node, torch.Tensor):
        if type(node) not in (torch.Tensor, torch.nn.Parameter) or node.layout != torch.strided or node.is_meta:
            # A quantized subclass would be written as its bare storage; the engine has to hand out its parts.
            raise TypeError(f"state{path}: {type(node).__name__} on {node.device} is not a plain dense tensor")
        tensors[path] = node.detach()
        return {"$tensor": path}
    if isinstance(node, dict):
        pairs = []
        for key, value in node.items():
            if type(key) not in (str, int):
                raise TypeError(f"state{path}: key {key!r} is {type(key).__name__}, not str or int")
            pairs.append([key, encode(value, f"{path}/{_escape(key)}", tensors)])
        return {"$dict": pairs}
    if isinstance(node, tuple | list):
        items = [encode(value, f"{path}/[{i}]", tensors) for i, value in enumerate(node)]
        return {"$tuple": items} if isinstance(node, tuple) else items
    if type(node) is float and not math.isfinite(node):
        return {"$float": repr(node)}
    if node is None or type(node) in (bool, int, float, str):
        return node
    raise TypeError(f"state{path}: {type(node).__name__} is neither a tensor nor JSON")


def _escape(key: str | int) -> str:
    # Marking int keys and list items keeps {"1": a}, {1: b} and [c] apart; a str key that looks like a mark gets one more tilde code.
    if isinstance(key, int):
        return f"({key})"
    text = key.replace("~", "~0").replace("/", "~1")
    return "~2" + text if text.startswith(("(", "[")) else text


def decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Inverse of :func:`encode`."""
    if isinstance(node, list):
        return [decode(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "$tensor":
        return tensors[value]
    if kind == "$float":
        return float(value)
    if kind == "$tuple":
        return tuple(decode(item, tensors) for item in value)
    return {key: decode(item, tensors) for key, item in value}


def write_share(folder: Path, rank: int, state: dict[Any, Any]) -> Files:
    """Write the share of ``rank``, 1 or above, into the folder of an unfinished checkpoint; returns its files for the manifest.

    Raises:
        CheckpointError: any refusal of the file system; the checkpoint must not be finished then.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = encode(state, "", tensors)
    try:
        files = _write_state(folder, file_prefix(rank), structure, tensors)
        fsync_folder(folder)
    except OSError as error:
        reason = NO_SPACE.get(error.errno or 0, error.strerror)
        raise CheckpointError(
            f"the share of a checkpoint under {folder.parent} was not written: {reason}; older checkpoints are untouched. Every rank has "
            "to see run.out_dir and to have space in it."
        ) from error
    return files


def file_prefix(rank: int) -> str:
    """What the names of a rank's files begin with; rank 0's are named as those of a trainer of one rank."""
    return f"rank_{rank:05d}." if rank else ""


def files_of(files: Files, rank: int) -> Files:
    """Those of one rank."""
    return {name: entry for name, entry in files.items() if (name.startswith(file_prefix(rank)) if rank else not name.startswith("rank_"))}


def _write_state(folder: Path, prefix: str, structure: Any, tensors: dict[str, torch.Tensor]) -> Files:
    files: Files = {}
    for index, keys in enumerate(_shards(tensors)):
        # Cloned, so that tied tensors and views each own their bytes; one shard at a time bounds the host memory.
        shard = {key: tensors[key].to("cpu", copy=True).contiguous() for key in keys}
        name = f"{prefix}tensors-{index:05d}.safetensors"
        files[name] = _write_file(folder / name, safetensors.torch.save(shard))
    name = f"{prefix}state.json"
    files[name] = _write_file(folder / name, json.dumps(structure, allow_nan=False).encode())
    return files


def write_folder(folder: Path, step: int, structure: Any, tensors: dict[str, torch.Tensor], shares: Files) -> None:
    """State of rank 0 and the manifest over it and the ``shares`` of the others, which are there already."""
    files = _write_state(folder, file_prefix(0), structure, tensors) | shares
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
    manifest["sha256"] = _manifest_digest(manifest)
    _write_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    fsync_folder(folder)


def _shards(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    shards: list[list[str]] = []
    filled = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not shards or filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards


def _write_file(path: Path, data: bytes) -> dict[str, Any]:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def fsync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """sha256 of everything in the manifest but its own digest."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest, if it is whole and of ``step``; DamagedError otherwise."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        version, altered = manifest["format"], manifest["sha256"] != _manifest_digest(manifest)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is not a checkpoint manifest") from error
    if altered:
        raise DamagedError(f"{path} does not match its sha256, its bytes were altered")
    if version != FORMAT:
        raise DamagedError(f"{path} has format {version}, this version reads {FORMAT}")
    if manifest["step"] != step:
        raise DamagedError(f"{path} is of step {manifest['step']}, not of step {step}")
    return manifest


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    """Size and digest of a file, read in pieces."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    _compare(path, entry, size, digest)


def read_verified(path: Path, entry: dict[str, Any]) -> bytes:
    """The very bytes that were checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    _compare(path, entry, len(data), hashlib.sha256(data).hexdigest())
    return data


def _compare(path: Path, entry: dict[str, Any], size: int, digest: str) -> None:
    if size != entry["bytes"]:
        raise DamagedError(f"{path} has {size} bytes instead of {entry['bytes']}")
    if digest != entry["sha256"]:
        raise DamagedError(f"{path} does not match its sha256, its bytes were altered")
