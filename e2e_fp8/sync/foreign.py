"""A torch module of any training loop, served by ``vllm serve``: its weights delivered with a receipt, its samples read back.

served = ServedModel(model, "http://127.0.0.1:8000", transport="ipc")    # the token from E2E_FP8_TOKEN
served.publish(policy_version=1)
served.generate([1, 2, 3], max_tokens=16)
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from e2e_fp8.errors import EngineError
from e2e_fp8.numerics.blockwise import quantize_blockwise
from e2e_fp8.numerics.formats import E4M3, TILE
from e2e_fp8.sync.publish_report import PublishReport
from e2e_fp8.sync.publisher import WeightPublisher
from e2e_fp8.sync.token import read_token
from e2e_fp8.types import ExportedTensor

_EXPERTS = ".mlp.experts"


class ServedModel:
    """Publishes one module, whose ``named_parameters`` have Hugging Face names, into one server and samples from it."""

    def __init__(self, model: torch.nn.Module, url: str, *, transport: str, token: str | None = None, timeout_s: float = 600.0) -> None:
        """``token``: by default that of E2E_FP8_TOKEN or E2E_FP8_TOKEN_FILE; ``transport`` as of ``WeightPublisher``, without ``disk``.

        Raises ConfigError for a missing token or unknown transport, EngineError when the server is not there.
        """
        self.model, device = model, next(model.parameters()).device
        self.publisher = WeightPublisher(url, token or read_token(), transport=transport, device=device, timeout_s=timeout_s)
        self.plan: dict[str, Any] = self.publisher.workers[0]["plan"]
        """What the server computes with, see ``rollout.agreement.worker_facts``."""

    @property
    def fp8_modules(self) -> list[str]:
        """The linear modules of the model that the server runs in block FP8, by name."""
        precision = self.plan["modules"]
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(getattr(module, "weight", None), torch.Tensor)
            and precision.get(name.partition(_EXPERTS)[0] + _EXPERTS if _EXPERTS in name else name) == "fp8"
        ]

    def publish(self, policy_version: int, *, receipt: bool = True) -> PublishReport:
        """Deliver every parameter; generation resumes once the bytes of every rank are known to be these. Errors as of
        ``WeightPublisher.publish``."""
        tensors = block_fp8_tensors(
            self.model,
            self.fp8_modules,
            power_2_scale=bool(self.plan["power_2_scale"]),
            amax_epsilon=float(self.plan["amax_epsilon"] or 0.0),
        )
        return self.publisher.publish(tensors, policy_version=policy_version, receipt=receipt)

    def generate(self, token_ids: Sequence[int], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None) -> list[int]:
        """Token ids of one response. Raises EngineError when the server refuses, as between a failed update and the next."""
        params = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "detokenize": False}
        answer = self.publisher.client.post("/inference/v1/generate", {"token_ids": list(token_ids), "sampling_params": params})
        return answer["choices"][0]["token_ids"]

    def close(self) -> None:
        """Release what both ends hold for the transport; the server keeps serving."""
        self.publisher.close()


def block_fp8_tensors(
    model: torch.nn.Module, fp8_modules: Collection[str], *, power_2_scale: bool = False, amax_epsilon: float = 0.0
) -> Iterator[ExportedTensor]:
    """Every parameter under its own name, those of ``fp8_modules`` as E4M3 codes ``[N, K]`` and scales ``[ceil(N/128), ceil(K/128)]``.

    Transformer Engine's block-FP8 weights give their own bytes, without the columns that pad their scales; weights of a higher
    precision are rounded to BF16 and quantized in 128x128 tiles, with its formula.

    Raises:
        EngineError: a weight is FP8 in another form, or outside ``fp8_modules``.
    """
    wanted = {f"{name}.weight" for name in fp8_modules}
    for name, parameter in model.named_parameters():
        codes = getattr(parameter, "_rowwise_data", None)
        if (codes is not None and name not in wanted) or (codes is None and name in wanted and parameter.element_size() == 1):
            where = "runs in BF16 in the server" if name not in wanted else "is no 128x128 block-FP8 weight of Transformer Engine"
            raise EngineError(f"{name} is {type(parameter).__name__} in the trainer, but {where}: its bytes cannot be delivered.")
        if name not in wanted:
            yield ExportedTensor(name=name, tensor=parameter.detach())
            continue
        if codes is not None:
            if not getattr(parameter, "_is_2D_scaled", False):
                raise EngineError(
                    f"{name} is quantized in 1x128 tiles, but vLLM needs 128x128 ones: use a weight quantizer with block_scaling_dim 2."
                )
            data, scale_inv = codes.view(E4M3.dtype), parameter._rowwise_scale_inv[:, : -(-codes.shape[1] // TILE)]  # pyright: ignore[reportAttributeAccessIssue]
        else:
            block = quantize_blockwise(
                parameter.detach().bfloat16(), E4M3, "128x128", power_2_scale=power_2_scale, amax_epsilon=amax_epsilon
            )
            data, scale_inv = block.codes, block.scale_inv
        yield ExportedTensor(name=name, tensor=data)
        yield ExportedTensor(name=f"{name}_scale_inv", tensor=scale_inv)
