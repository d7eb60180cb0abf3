"""Slow router replay in float64, token by token, from R3's formula (arXiv 2510.11370): ``g = I exp(s) / sum(I exp(s))``.

Shares no code with the project. ``T`` tokens, ``E`` experts, ``k`` slots, ``H`` width.
"""

import math

import torch


def gate_weights(logits: list[float], ids: list[int], *, over_chosen: bool) -> list[float]:
    """Softmax over the chosen logits, or over all and then taken at the chosen ones."""
    support = ids if over_chosen else range(len(logits))
    largest = max(logits[e] for e in support)
    total = math.fsum(math.exp(logits[e] - largest) for e in support)
    return [math.exp(logits[e] - largest) / total for e in ids]


def router_gradient(
    x_TH: torch.Tensor, weight_EH: torch.Tensor, ids_Tk: torch.Tensor, grad_TE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Gradient of the router's weight when gate weights are the softmax over the chosen logits, whatever was multiplied forward.

    Returns ``(gradient [E, H], sum of |terms| [E, H], largest sum of |terms| of a logit)``; the last two bound rounding errors. ``grad_TE``
    is the gradient of the loss by each gate weight.
    """
    x, weight, grad = x_TH.double(), weight_EH.double(), grad_TE.double()
    found, terms = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, ids in enumerate(ids_Tk.tolist()):
        logits = (weight @ x[t]).tolist()
        g = gate_weights(logits, ids, over_chosen=True)
        mean = math.fsum(g[j] * float(grad[t, e]) for j, e in enumerate(ids))
        size = math.fsum(g[j] * abs(float(grad[t, e])) for j, e in enumerate(ids))
        for j, e in enumerate(ids):
            found[e] += g[j] * (float(grad[t, e]) - mean) * x[t]
            terms[e] += g[j] * (abs(float(grad[t, e])) + size) * x[t].abs()
    return found, terms, float((x.abs() @ weight.abs().T).max())


def sum_in_slot_order(outputs_AH: torch.Tensor, ids_Tk: torch.Tensor, experts: int) -> torch.Tensor:
    """Each token's expert outputs added slot after slot in FP32; ``outputs_AH`` by expert, then token."""
    row, rows = 0, {}
    for expert in range(experts):
        for token, ids in enumerate(ids_Tk.tolist()):
            if expert in ids:
                rows[token, expert] = row
                row += 1
    total = []
    for token, ids in enumerate(ids_Tk.tolist()):
        value = torch.zeros(outputs_AH.shape[1])
        for expert in ids:
            value = value + outputs_AH[rows[token, expert]].float()
        total.append(value.to(outputs_AH.dtype))
    return torch.stack(total)
