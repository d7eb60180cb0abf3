"""Do the FP8 bytes of this configuration pass between its parallel sizes? Asked of the layout algebra before anything starts. Torch-free.

Most transports hand weights over under Hugging Face names, so every tile has to be whole in such a tensor as well. Only with
``sync.transport=ranks``, which moves rows of fused matrices, is the verdict ``native`` enough.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.errors import ConfigError, LayoutError
from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
from e2e_fp8.layout.plan import Plan
from e2e_fp8.layout.straddles import Setting, nearest_settings, refusal, verdicts
from e2e_fp8.megatron_names import QKV_ORDER

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config

_WHOLE_TENSORS: tuple[str, ...] = ("pass",)
_ROWS: tuple[str, ...] = ("pass", "native")


def check_layout(cfg: "Config", is_fp8: Callable[[str], bool]) -> None:
    """Refuse parallel sizes between which FP8 bytes cannot pass.

    ``is_fp8`` says of a Hugging Face linear module whether a side runs it in FP8. With BF16 training the tiles are those of whole
    Hugging Face tensors, whatever the trainer's sizes.

    Raises:
        ConfigError: a list of every tensor with rows and reason, and the sizes that would work.
    """
    fp8_training, parallel = cfg.numerics.training_precision == "fp8", cfg.training.parallel
    train = MegatronParallel(tensor=parallel.tensor, expert_tensor=parallel.expert_tensor) if fp8_training else MegatronParallel()
    rollout = EngineParallel(tensor=cfg.rollout.tensor_parallel, expert=cfg.rollout.expert_parallel)
    spec = "te" if fp8_training else "local"
    # experts of a layer are alike, and a pattern that tells them apart is refused by another rule
    experts = {"num_experts": rollout.tensor if rollout.expert else 1} if cfg.model.is_moe else {}
    hf_config = to_hf_config(cfg.model, None) | experts
    try:
        plan = Plan.from_config(hf_config, train, rollout, qkv_order=QKV_ORDER, spec=spec, fp8=is_fp8)
        found = verdicts(plan)
    except LayoutError as error:
        raise ConfigError(f"training.parallel and rollout.tensor_parallel do not fit the model: {error}") from error
    allowed = _ROWS if cfg.sync.transport == "ranks" else _WHOLE_TENSORS
    if any(one.verdict not in allowed for one in found):
        raise ConfigError(refusal(found, _working(plan, fp8_training, allowed), allowed=allowed))


def _working(plan: Plan, fp8_training: bool, allowed: tuple[str, ...]) -> list[str]:
    def usable(setting: Setting) -> bool:
        train, rollout, order = setting
        same_train = (train.tensor, train.expert_tensor_size) == (plan.train.tensor, plan.train.expert_tensor_size)
        return order == QKV_ORDER and rollout.expert == plan.rollout.expert and (fp8_training or same_train)

    working: dict[str, list[str]] = {}
    for train, rollout, _ in nearest_settings(plan, allowed=allowed, usable=usable):
        experts = f" training.parallel.expert_tensor={train.expert_tensor_size}" if plan.shape.experts else ""
        trainer = f"training.parallel.tensor={train.tensor}{experts} " if fp8_training else ""
        working.setdefault(f"{trainer}rollout.tensor_parallel=", []).append(str(rollout.tensor))
    return [rest + "|".join(sizes) for rest, sizes in working.items()]
