"""Slow router logits in float64 from the definition, one tile at a time; shares no code with the project but the format's numbers."""

import torch


def through_e4m3(x: torch.Tensor, rows: int, columns: int, power_2_scale: bool) -> torch.Tensor:
    """float64 values of ``x`` after E4M3 in tiles of ``rows`` x ``columns``, scales as Transformer Engine's (448 / amax, inverted)."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            tile = x[top : top + rows, left : left + columns].float()
            amax = tile.abs().max()
            quant_scale = torch.tensor(448.0) / amax if amax > 0 else torch.tensor(1.0)
            if power_2_scale:
                quant_scale = torch.exp2(torch.floor(torch.log2(quant_scale.double()))).float()
            codes = (tile * quant_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[top : top + rows, left : left + columns] = codes.double() * (1.0 / quant_scale).double()
    return out


def router_logits(x_MK: torch.Tensor, weight_EK: torch.Tensor, precision: str, x_pow2: bool, w_pow2: bool) -> torch.Tensor:
    """float64 ``[M, E]`` before the result is rounded."""
    if precision == "fp8":
        return through_e4m3(x_MK, 1, 128, x_pow2) @ through_e4m3(weight_EK, 128, 128, w_pow2).T
    return x_MK.double() @ weight_EK.double().T
