"""Run state on disk: safetensors for tensors, JSON for everything else, no pickle.

A checkpoint is one folder ``step_00000012``::

    tensors-00000.safetensors ...   tensors under their flattened keys, at most SHARD_BYTES a file unless one tensor is larger
    state.json                      the nested structure, with a reference in place of each tensor
    manifest.json                   format, step, and sha256 and size of every other file, and its own sha256

It is written under a temporary name, every file and folder is fsynced, and one rename makes it visible, so a process killed at
any point leaves either the whole new checkpoint or only the older ones.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from e2e_fp8.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 2
SHARD_BYTES = 1 << 30
_NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "the file size limit is reached"}
_STEP_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")


class CheckpointStore:
    """Checkpoints of one run under ``root``; one process saves at a time.

    Args:
        root: Folder of the checkpoints, made if missing.
        keep: Newest checkpoints kept, at least 1; older ones go only after a newer one is whole.

    Raises:
        CheckpointError: ``root`` cannot be made.
    """

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.root = Path(root)
        self.keep = keep
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Checkpoint folder {self.root} cannot be made: {error.strerror}; choose another run.out_dir.") from error

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending; whole or not."""
        return sorted({int(match[1]) for path in self.root.iterdir() if (match := _STEP_NAME.fullmatch(path.name))})

    def save(self, step: int, state: dict[Any, Any]) -> Path:
        """Write ``state`` as the checkpoint of ``step`` and drop what ``keep`` no longer covers.

        Checkpoints of later steps, left by a run that was resumed from before them, are dropped too.

        Args:
            step: Non-negative step.
            state: Nested dicts (str or int keys), lists and tuples of tensors (any plain dense dtype, any device) and JSON scalars.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: No space, or any other refusal of the file system; existing checkpoints are untouched.
            TypeError: A value that is neither a plain tensor nor JSON; names its key.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        tensors: dict[str, torch.Tensor] = {}
        structure = _encode(state, "", tensors)
        needed_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        final = self.root / f"step_{step:08d}"
        temporary = None
        try:
            self._remove_leftovers()
            free_bytes = shutil.disk_usage(self.root).free
            if needed_bytes > free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{final.name}-", dir=self.root))
            _write_folder(temporary, step, structure, tensors)
            self._publish(temporary, final)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise self._write_error(final, needed_bytes, error) from error
        except BaseException:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(step)
        return final

    def latest(self) -> int | None:
        """Newest step whose checkpoint is whole, or None when there is no checkpoint at all. Reads and hashes every byte.

        A damaged newer checkpoint is passed over with a logged warning that names the file.

        Raises:
            CheckpointError: Checkpoints exist and every one is damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            fault = self._fault(step)
            if fault is None:
                return step
            logger.warning("Checkpoint of step %d is passed over: %s", step, fault)
        if steps:
            raise CheckpointError(
                f"No checkpoint under {self.root} is whole (steps {steps}): {self._fault(steps[-1])}; start a new run under another name."
            )
        return None

    def load(self, step: int) -> dict[Any, Any]:
        """State of ``step`` as it was saved: tensors on the CPU, contiguous, bit for bit; every file verified before use.

        Raises:
            CheckpointError: Missing, truncated or altered; names the file and the next older good step.
        """
        folder = self._folder(step)
        try:
            manifest = _read_manifest(folder, step)
            tensors: dict[str, torch.Tensor] = {}
            for name in sorted(manifest["files"]):
                if name.endswith(".safetensors"):
                    tensors.update(safetensors.torch.load(_read_verified(folder / name, manifest["files"][name])))
            structure = json.loads(_read_verified(folder / "state.json", manifest["files"]["state.json"]))
        except _DamagedError as fault:
            raise CheckpointError(f"Checkpoint of step {step} cannot be loaded: {fault}; {self._advice(step)}.") from fault
        return _decode(structure, tensors)

    def load_latest(self) -> dict[Any, Any]:
        """State of the newest whole checkpoint; ``latest()`` says of which step.

        Raises:
            CheckpointError: There is none, or every one is damaged.
        """
        step = self.latest()
        if step is None:
            raise CheckpointError(f"There is no checkpoint under {self.root}; start the run without resume.")
        return self.load(step)

    def _folder(self, step: int) -> Path:
        # A save over an existing step moves the old folder aside first; killed in between, the old one still counts.
        folder = self.root / f"step_{step:08d}"
        replaced = folder.with_name(folder.name + ".replaced")
        return replaced if replaced.exists() and not folder.exists() else folder

    def _fault(self, step: int) -> "_DamagedError | None":
        folder = self._folder(step)
        try:
            for name, entry in _read_manifest(folder, step)["files"].items():
                _verify(folder / name, entry)
        except _DamagedError as fault:
            return fault
        return None

    def _advice(self, step: int) -> str:
        older = next((s for s in reversed(self.steps()) if s < step and self._fault(s) is None), None)
        if older is None:
            return "there is no older good checkpoint, start a new run under another name"
        return f"the next older good checkpoint is step {older}"

    def _publish(self, temporary: Path, final: Path) -> None:
        if final.exists():
            replaced = final.with_name(final.name + ".replaced")
            self._discard(replaced)
            os.rename(final, replaced)
        os.rename(temporary, final)
        _fsync_folder(self.root)

    def _prune(self, newest: int) -> None:
        self._discard(self.root / f"step_{newest:08d}.replaced")
        older = [s for s in self.steps() if s < newest]
        kept = set(older[max(0, len(older) - (self.keep - 1)) :]) | {newest}
        for step in self.steps():
            if step > newest:
                logger.warning("Checkpoint of step %d is removed: the run continued from before it and is now at step %d.", step, newest)
            if step not in kept:
                self._discard(self.root / f"step_{step:08d}")
                self._discard(self.root / f"step_{step:08d}.replaced")

    def _discard(self, folder: Path) -> None:
        # Renamed first: a removal killed half-way must not leave something that looks like a damaged checkpoint.
        if folder.exists():
            doomed = Path(tempfile.mkdtemp(prefix=".tmp-removed-", dir=self.root))
            os.rename(folder, doomed / folder.name)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        for path in self.root.glob(".tmp-*"):
            shutil.rmtree(path)

    def _write_error(self, final: Path, needed_bytes: int, error: OSError) -> CheckpointError:
        if error.errno in _NO_SPACE:
            return CheckpointError(
                f"Checkpoint {final} was not written because {_NO_SPACE[error.errno]}: it needs {needed_bytes} bytes of tensors, "
                f"{shutil.disk_usage(self.root).free} bytes are free; older checkpoints are untouched, free some space and resume."
            )
        return CheckpointError(f"Checkpoint {final} was not written: {error.strerror}; older checkpoints are untouched.")


class _DamagedError(Exception):
    """One file of a checkpoint is not what the manifest says."""


def _encode(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
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
            pairs.append([key, _encode(value, f"{path}/{_escape(key)}", tensors)])
        return {"$dict": pairs}
    if isinstance(node, tuple | list):
        items = [_encode(value, f"{path}/[{i}]", tensors) for i, value in enumerate(node)]
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


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "$tensor":
        return tensors[value]
    if kind == "$float":
        return float(value)
    if kind == "$tuple":
        return tuple(_decode(item, tensors) for item in value)
    return {key: _decode(item, tensors) for key, item in value}


def _write_folder(folder: Path, step: int, structure: Any, tensors: dict[str, torch.Tensor]) -> None:
    files: dict[str, dict[str, Any]] = {}
    for index, keys in enumerate(_shards(tensors)):
        # Cloned, so that tied tensors and views each own their bytes; one shard at a time bounds the host memory.
        shard = {key: tensors[key].to("cpu", copy=True).contiguous() for key in keys}
        name = f"tensors-{index:05d}.safetensors"
        files[name] = _write_file(folder / name, safetensors.torch.save(shard))
    files["state.json"] = _write_file(folder / "state.json", json.dumps(structure, allow_nan=False).encode())
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
    manifest["sha256"] = _manifest_digest(manifest)
    _write_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    _fsync_folder(folder)


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


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """sha256 of everything in the manifest but its own digest."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path, step: int) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        version, altered = manifest["format"], manifest["sha256"] != _manifest_digest(manifest)
    except OSError as error:
        raise _DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{path} is not a checkpoint manifest") from error
    if altered:
        raise _DamagedError(f"{path} does not match its sha256, its bytes were altered")
    if version != FORMAT:
        raise _DamagedError(f"{path} has format {version}, this version reads {FORMAT}")
    if manifest["step"] != step:
        raise _DamagedError(f"{path} is of step {manifest['step']}, not of step {step}")
    return manifest


def _verify(path: Path, entry: dict[str, Any]) -> None:
    """Size and digest of a file, read in pieces."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _DamagedError(f"{path} cannot be read ({error.strerror})") from error
    _compare(path, entry, size, digest)


def _read_verified(path: Path, entry: dict[str, Any]) -> bytes:
    """The very bytes that were checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _DamagedError(f"{path} cannot be read ({error.strerror})") from error
    _compare(path, entry, len(data), hashlib.sha256(data).hexdigest())
    return data


def _compare(path: Path, entry: dict[str, Any], size: int, digest: str) -> None:
    if size != entry["bytes"]:
        raise _DamagedError(f"{path} has {size} bytes instead of {entry['bytes']}")
    if digest != entry["sha256"]:
        raise _DamagedError(f"{path} does not match its sha256, its bytes were altered")
