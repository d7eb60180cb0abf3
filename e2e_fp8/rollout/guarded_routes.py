"""Which routes of ``vllm serve`` do what, as the token guard takes them."""

from e2e_fp8.sync.http_client import METHOD_ROUTE, REFUSE_ROUTE, UPDATE_ROUTE

OPEN_ROUTES = ("/health",)
CONTROL_ROUTES = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
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
UNSEEN_METHODS = (
    "weight_update",
    "refuse_generation",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
    "load_model",
    "sleep",
    "wake_up",
)
"""Of workers: through ``/collective_rpc`` they would change weights, or what is said of them, unseen by the guard."""
