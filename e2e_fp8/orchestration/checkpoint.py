"""Run state on disk: safetensors for tensors, JSON for everything else, no pickle.

A checkpoint is one folder ``step_00000012``::

    tensors-00000.safetensors ...   tensors under their flattened keys, at most SHARD_BYTES a file unless one tensor is larger
    state.json                      the nested structure, with a reference in place of each tensor
    manifest.json                   format, step, and sha256 and size of every other file, and its own sha256
    rank_00001.tensors-00000...     the same of a trainer's ranks 1, 2, ..., each written by that rank before the manifest

It is written under a temporary name, every file and folder is fsynced, and one rename makes it visible, so a process killed at
any point leaves either the whole new checkpoint or only the older ones.
"""

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from e2e_fp8.errors import CheckpointError
from e2e_fp8.orchestration.checkpoint_files import (
    NO_SPACE,
    DamagedError,
    Files,
    decode,
    encode,
    file_prefix,
    files_of,
    fsync_folder,
    read_manifest,
    read_verified,
    verify_file,
    write_folder,
)

logger = logging.getLogger(__name__)

WriteShares = Callable[[Path], Files]
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

    def save(self, step: int, state: dict[Any, Any], write_shares: WriteShares | None = None) -> Path:
        """Write ``state`` as the checkpoint of ``step`` and drop what ``keep`` no longer covers.

        Checkpoints of later steps, left by a run that was resumed from before them, are dropped too.

        Args:
            step: Non-negative step.
            state: Nested dicts (str or int keys), lists and tuples of tensors (any plain dense dtype, any device) and JSON scalars.
            write_shares: Has other ranks write their shares into the unfinished folder (:func:`write_share`) and returns their files.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: No space, or any other refusal of the file system; existing checkpoints are untouched.
            TypeError: A value that is neither a plain tensor nor JSON; names its key.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        tensors: dict[str, torch.Tensor] = {}
        structure = encode(state, "", tensors)
        needed_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        final = self.root / f"step_{step:08d}"
        temporary = None
        try:
            self._remove_leftovers()
            free_bytes = shutil.disk_usage(self.root).free
            if needed_bytes > free_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{final.name}-", dir=self.root))
            shares = write_shares(temporary) if write_shares is not None else {}
            write_folder(temporary, step, structure, tensors, shares)
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

    def load(self, step: int, *, rank: int = 0) -> dict[Any, Any]:
        """State of ``step`` as ``rank`` saved it: tensors on the CPU, contiguous, bit for bit; every file verified before use.

        Raises:
            CheckpointError: Missing, truncated or altered; names the file and the next older good step.
        """
        folder = self._folder(step)
        try:
            files = files_of(read_manifest(folder, step)["files"], rank)
            tensors: dict[str, torch.Tensor] = {}
            for name in sorted(files):
                if name.endswith(".safetensors"):
                    tensors.update(safetensors.torch.load(read_verified(folder / name, files[name])))
            if not files:
                raise DamagedError(f"{folder} holds no share of rank {rank}")
            name = f"{file_prefix(rank)}state.json"
            structure = json.loads(read_verified(folder / name, files[name]))
        except DamagedError as fault:
            raise CheckpointError(f"Checkpoint of step {step} cannot be loaded: {fault}; {self._advice(step)}.") from fault
        return decode(structure, tensors)

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

    def _fault(self, step: int) -> DamagedError | None:
        folder = self._folder(step)
        try:
            for name, entry in read_manifest(folder, step)["files"].items():
                verify_file(folder / name, entry)
        except DamagedError as fault:
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
        fsync_folder(self.root)

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
        if error.errno in NO_SPACE:
            return CheckpointError(
                f"Checkpoint {final} was not written because {NO_SPACE[error.errno]}: it needs {needed_bytes} bytes of tensors, "
                f"{shutil.disk_usage(self.root).free} bytes are free; older checkpoints are untouched, free some space and resume."
            )
        return CheckpointError(f"Checkpoint {final} was not written: {error.strerror}; older checkpoints are untouched.")
