"""One process with a real vLLM engine that takes the whole tensors gathered from trainer ranks.

    rank_engine_process.py OUT      OUT/case.json and OUT/gathered.safetensors as rank_process.py wrote them

Writes OUT/engine.json: digest of what was delivered, digest of what the engine holds, and one sample.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from e2e_fp8.config.hf import to_hf_config
from e2e_fp8.config.root import Config
from e2e_fp8.numerics.quantization_plan import QuantizationPlan
from e2e_fp8.rollout.engine import VllmEngine
from e2e_fp8.sync.receipt import check_receipt, manifest_of
from e2e_fp8.types import ExportedTensor, Prompt


def main(out: Path) -> None:
    cfg = Config.model_validate(json.loads((out / "case.json").read_text())["config"])
    model_dir = out / "model"
    model_dir.mkdir()
    quantization = QuantizationPlan.from_config(cfg).hf_quantization_config(cfg.model)
    (model_dir / "config.json").write_text(json.dumps(to_hf_config(cfg.model, quantization, eos_token_id=1)))
    engine = VllmEngine(cfg, model_dir, 1, lambda ids: " ".join(map(str, ids)))
    tensors = [ExportedTensor(name=name, tensor=tensor) for name, tensor in load_file(out / "gathered.safetensors").items()]
    engine.update_weights(iter(tensors), policy_version=2)
    delivered, live = manifest_of(tensors), manifest_of(engine.read_back())
    check_receipt(delivered, live, policy_version=2)
    (sample,) = engine.generate([Prompt(uid="p", text="", token_ids=(2, 3, 5, 7), answer="")], group_size=1, seed=3)
    record = {"delivered": delivered.combined, "live": live.combined, "digests": live.digests, "tokens": sample.response_token_ids}
    (out / "engine.json").write_text(json.dumps(record))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
