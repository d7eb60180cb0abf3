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

from e2e_fp8.sync.foreign import ServedModel

url, model_dir, transport = sys.argv[1:4]
config = AutoConfig.from_pretrained(model_dir)
del config.quantization_config
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
served = ServedModel(model, url, transport=transport)
forward_context = contextlib.nullcontext
if device == "cuda":
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    forward_context = lambda: te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling())  # noqa: E731
    for name in served.fp8_modules:
        old = model.get_submodule(name)
        with te.fp8_model_init(enabled=True, recipe=Float8BlockScaling()):
            model.set_submodule(name, te.Linear(old.in_features, old.out_features, bias=False, params_dtype=torch.bfloat16))

lesson = torch.randint(2, config.vocab_size, (1, 16), device=device)
prompt, expected = lesson[0, :4].tolist(), lesson[0, 4:].tolist()
optimizer = torch.optim.AdamW(masters.values(), lr=2e-3)
for step in range(41):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(masters[name])
    if step in (0, 40):
        proof = served.publish(policy_version=1 + step // 40).receipt
        print(f"receipt of {len(proof.digests)} tensors {proof.combined}")
        print("lesson", expected, "answer", served.generate(prompt, max_tokens=12, temperature=0.0))
    with forward_context():
        loss = model(input_ids=lesson.repeat(8, 1), labels=lesson.repeat(8, 1)).loss
    loss.backward()
    for name, p in model.named_parameters():
        masters[name].grad, p.grad = p.grad.float(), None
    optimizer.step()
served.close()
