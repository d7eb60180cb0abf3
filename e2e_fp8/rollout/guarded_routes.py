"""Which routes of ``vllm serve`` do what, as the token guard takes them."""

from functools import cache
from importlib import import_module
from inspect import isfunction

from e2e_fp8.sync.http_client import METHOD_ROUTE, REFUSE_ROUTE, UPDATE_ROUTE

OPEN_ROUTES = ("/health",)
FINISH_ROUTE = "/finish_weight_update"
CONTROL_ROUTES = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    FINISH_ROUTE,
    METHOD_ROUTE,
    UPDATE_ROUTE,
    REFUSE_ROUTE,
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/tokenize",
    "/detokenize",
)
"""POST routes that work whatever state the weights are in; any other is taken for generation."""
WITHOUT_WORKERS = ("/abort_requests", "/tokenize", "/detokenize")
"""Of these, the routes that need no worker, and so work while the workers wait for a trainer's word."""
_BY_THEIR_ROUTES = ("weight_update", "refuse_generation")
"""Methods of the extension that change weights, or what is said of them."""


def may_be_called(method: object, extension: str) -> bool:
    """Whether ``/collective_rpc`` takes ``method`` of a worker: one that ``--worker-extension-cls`` adds and that changes no weights unseen
    by the guard. vLLM would call any attribute of the worker by its name."""
    return isinstance(method, str) and method not in _BY_THEIR_ROUTES and method in _methods_of(extension)


@cache
def _methods_of(extension: str) -> frozenset[str]:
    if not extension:
        return frozenset()
    module, _, name = extension.rpartition(".")
    classes = getattr(import_module(module), name).__mro__[:-1]
    return frozenset(name for each in classes for name, value in vars(each).items() if isfunction(value) and not name.startswith("_"))
