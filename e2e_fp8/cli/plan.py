"""``e2e-fp8 plan``: how a model's bytes get from training ranks to rollout ranks, or why they cannot. Needs no weights, torch or GPU."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e_fp8.errors import ConfigError

if TYPE_CHECKING:
    from e2e_fp8.config.root import Config
    from e2e_fp8.layout.plan import Plan

_DETAIL = """\
Says for every FP8 weight whether its bytes and block scales pass from Megatron's layout into vLLM's without requantization:
  pass    yes, and as a block-FP8 checkpoint too
  native  yes, because training quantizes the same fused matrix as the engine; no checkpoint can hold these bytes
  refuse  no: exit code 2, with every tensor, the rows, and the sizes that would work

--model takes a config.json, its folder, or a run's YAML, whose parallel sizes are the defaults. A config.json without
quantization_config is planned with FP8 in every linear layer of the model, as training would do.
"""


def add_plan(commands: "argparse._SubParsersAction") -> None:
    """Add the sub-command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="do FP8 bytes pass between these parallel sizes? which rows go where?",
        description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="CONFIG", type=Path, required=True, help="config.json, a folder with one, or a run's YAML")
    for side, names in (("train", ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")), ("rollout", ("tp", "dp", "replicas"))):
        for name in names:
            parser.add_argument(f"--{side}-{name}", type=int, metavar="N", help=_HELP[side, name])
    parser.add_argument("--train-first-layers", type=int, metavar="N", help="layers in the first pipeline stage")
    parser.add_argument("--train-last-layers", type=int, metavar="N", help="layers in the last pipeline stage")
    parser.add_argument("--rollout-ep", action="store_true", help="whole experts on each rollout rank (enable_expert_parallel)")
    parser.add_argument(
        "--qkv-order",
        choices=("engine", "megatron"),
        default="engine",
        help="rows of linear_qkv (default: %(default)s)",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="output (default: %(default)s)")
    parser.add_argument("--rank", type=int, metavar="N", help="list the copies into this rollout rank")
    parser.add_argument("--tensor", metavar="GLOB", help="list only copies whose parameter matches (rank 0 unless --rank is given)")
    parser.set_defaults(command=plan_command)


_HELP = {
    ("train", "tp"): "training tensor parallel size",
    ("train", "pp"): "training pipeline parallel size",
    ("train", "vpp"): "model chunks of a pipeline rank",
    ("train", "ep"): "training expert parallel size",
    ("train", "etp"): "tensor parallel size of the experts (default: --train-tp)",
    ("train", "cp"): "training context parallel size",
    ("train", "dp"): "training data parallel size (default: the smallest that fits)",
    ("rollout", "tp"): "tensor parallel size of one engine",
    ("rollout", "dp"): "data parallel size of one engine",
    ("rollout", "replicas"): "engines",
}


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan and return 0. Raises LayoutError when bytes cannot pass, ConfigError for an unusable file."""
    from e2e_fp8.layout.report import chosen_copies, copy_values, render_copies, render_summary, summary
    from e2e_fp8.layout.straddles import check

    plan = build_plan(args)
    found = check(plan)
    listed = args.rank is not None or args.tensor is not None
    copies = chosen_copies(plan, args.rank or 0, args.tensor or "*") if listed else []
    if args.format == "json":
        print(json.dumps(summary(plan, found) | ({"copies": [copy_values(one) for one in copies]} if listed else {}), indent=2))
    else:
        print(render_copies(copies) if listed else render_summary(plan, found))
    return 0


def build_plan(args: argparse.Namespace) -> "Plan":
    """The plan that the command line describes. Raises LayoutError or ConfigError."""
    from e2e_fp8.layout.parallel import EngineParallel, MegatronParallel
    from e2e_fp8.layout.plan import Plan

    hf_config, run = read_model(args.model)
    sizes = _sizes_of(run) if run else {}

    def size(name: str) -> int:
        given = getattr(args, name)
        return sizes.get(name, 1) if given is None else given

    train = MegatronParallel(
        tensor=size("train_tp"),
        pipeline=size("train_pp"),
        virtual_pipeline=args.train_vpp,
        expert=size("train_ep"),
        expert_tensor=args.train_etp,
        context=size("train_cp"),
        data=args.train_dp,
        first_stage_layers=args.train_first_layers,
        last_stage_layers=args.train_last_layers,
    )
    rollout = EngineParallel(tensor=size("rollout_tp"), data=size("rollout_dp"), expert=args.rollout_ep, replicas=size("rollout_replicas"))
    return Plan.from_config(hf_config, train, rollout, qkv_order=args.qkv_order)


def read_model(path: Path) -> tuple[dict[str, Any], "Config | None"]:
    """The config.json at ``path`` or in it, or the one a run's YAML stands for, with the run. Raises ConfigError."""
    if path.suffix in (".yaml", ".yml"):
        from e2e_fp8.config.hf import to_hf_config
        from e2e_fp8.config.load import load_config
        from e2e_fp8.numerics.quantization_plan import QuantizationPlan

        cfg = load_config(path, [])
        return to_hf_config(cfg.model, QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)), cfg
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--model {file} cannot be read as a model's config.json ({error}): pass a config.json or its folder.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file} holds a {type(config).__name__}, not an object: pass a model's config.json.")
    return config, None


def _sizes_of(cfg: "Config") -> dict[str, int]:
    parallel = cfg.training.parallel
    return {
        "train_tp": parallel.tensor,
        "train_pp": parallel.pipeline,
        "train_ep": parallel.expert,
        "train_cp": parallel.context,
        "rollout_tp": cfg.rollout.tensor_parallel,
    }
