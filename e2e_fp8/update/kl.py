"""Estimates of KL(policy, reference) on samples of the policy (Schulman 2020). Legend: T packed tokens."""

import torch


def kl_estimate(ref_log_ratio_T: torch.Tensor, estimator: str) -> torch.Tensor:
    """``[T]`` from d = lp_ref - lp, finite: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.

    By lp their gradients are 1, -d and 1 - exp(d). Averaged over the policy's samples, that of k2 alone is the gradient of the KL: k1's
    is 0 and k3's that of the reverse KL. ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of k2, as in verl's
    ``kl_penalty``. verl's ``low_var_kl`` in addition clamps k3 to +-10; this one does not.

    Raises:
        ValueError: an unknown estimator.
    """
    d = ref_log_ratio_T
    if estimator.endswith("+"):
        k2 = kl_estimate(d, "k2")
        return k2 - k2.detach() + kl_estimate(d, estimator[:-1]).detach()
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"unknown estimator {estimator}")
