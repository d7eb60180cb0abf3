"""A foreign training loop: plain Transformer Engine modules (plain torch on a CPU), served by vLLM over HTTP.

It teaches a dense Qwen3 one token sequence, publishes its weights before and after, and samples both times. Start the server with

    VLLM_SERVER_DEV_MODE=1 VLLM_USE_DEEP_GEMM_E8M0=0 E2E_FP8_TOKEN=$TOKEN vllm serve MODEL --host 127.0.0.1 --load-format dummy \\
      --weight-transfer-config '{"backend": "e2e_fp8"}' --middleware e2e_fp8.rollout.token_guard.TokenGuard \\
      --worker-extension-cls e2e_fp8.rollout.worker_extension.WorkerExtension

where MODEL holds a block-FP8 config.json, then E2E_FP8_TOKEN=$TOKEN python examples/foreign_trainer.py URL MODEL {ipc|nccl}.
On a GPU set NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 here.
"""

import contextlib
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3, TILE
from e2e_fp8.sync.http_client import ServerClient
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.sync.token import read_token
from e2e_fp8.types import ExportedTensor

url, model_dir, transport = sys.argv[1:4]
cuda, token = torch.cuda.is_available(), read_token()
device = torch.device("cuda:0" if cuda else "cpu")
config = AutoConfig.from_pretrained(model_dir)
skipped = set(config.quantization_config["modules_to_not_convert"])
del config.quantization_config
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
fp8 = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name not in skipped]
forward_context = contextlib.nullcontext
if cuda:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    recipe = Float8BlockScaling()
    for name in fp8:
        old = model.get_submodule(name)
        with te.fp8_model_init(enabled=True, recipe=recipe):
            new = te.Linear(old.in_features, old.out_features, bias=False, params_dtype=torch.bfloat16, device="cuda")
        model.set_submodule(name, new)
    forward_context = lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # noqa: E731


def publish(version: int) -> None:
    tensors = []
    for name, p in model.named_parameters():
        if name.removesuffix(".weight") not in fp8:
            tensors.append((name, p))
            continue
        if cuda:  # Transformer Engine's own bytes; it pads the columns of scales to a multiple of 4
            codes, scale_inv = p._rowwise_data.view(torch.float8_e4m3fn), p._rowwise_scale_inv[:, : p.shape[1] // TILE]
        else:
            block = quantize_blockwise(p.detach(), E4M3, "128x128", power_2_scale=False)
            codes, scale_inv = block.codes, block.scale_inv
        tensors += [(name, codes), (f"{name}_scale_inv", scale_inv)]
    report = publisher.publish((ExportedTensor(name=n, tensor=t) for n, t in tensors), policy_version=version)
    assert report.receipt is not None
    print(
        f"published version {version}: {report.num_bytes} bytes, receipt of {len(report.receipt.digests)} tensors {report.receipt.combined}"
    )


def sample() -> list[int]:
    params = {"temperature": 0.0, "max_tokens": lesson.shape[1] - 4, "detokenize": False}
    answer = client.post("/inference/v1/generate", {"token_ids": lesson[0, :4].tolist(), "sampling_params": params})
    return answer["choices"][0]["token_ids"]


publisher, client = WeightPublisher(url, token, transport=transport, device=device), ServerClient(url, token, timeout_s=60)
lesson = torch.randint(2, config.vocab_size, (1, 16), device=device)
batch, optimizer = lesson.repeat(8, 1), torch.optim.AdamW(masters.values(), lr=2e-3)
with torch.no_grad():
    for name, p in model.named_parameters():
        p.copy_(masters[name])
publish(1)
print("lesson", lesson[0, 4:].tolist(), "before", sample())
for _ in range(40):
    with forward_context():
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        for name, p in model.named_parameters():
            p.copy_(masters[name])
publish(2)
print(f"loss {loss.item():.4f}; after", sample())
publisher.close()
