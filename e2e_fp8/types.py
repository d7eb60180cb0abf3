"""Carriers that cross stages: frozen, keyword-only, one place for shapes and units.

Shape legend: ``P`` prompt tokens, ``R`` response tokens, ``S`` sequences of a micro-batch, ``T`` packed tokens
(sum of all sequence lengths of a micro-batch), ``L`` MoE-capable layers, ``k`` experts per token, in the engine's order (a slot each).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task item: what the model reads and what its verifier needs.

    Example: ``Prompt(uid="chain_sum-17", text="4 + 3 =", token_ids=(5, 9, 6), answer="7")``.
    """

    uid: str
    """Stable across runs and resumes; unique within a data set."""
    text: str
    token_ids: tuple[int, ...]
    """Encoded prompt, including any chat or separator tokens."""
    answer: str
    """Reference answer in text; also the supervised target of the warm start."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever the verifier needs besides ``answer``."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout of one prompt by one policy version."""

    prompt: Prompt
    group_id: int
    """Samples of one prompt in one step share it; advantages are relative to the group."""
    response_token_ids: tuple[int, ...]
    """R sampled tokens; the stop token, if one ended the response, is the last of them."""
    response_text: str
    rollout_log_probs: tuple[float, ...]
    """R natural-log probabilities of the sampled tokens at the sampling temperature, as the engine computed them."""
    routed_experts: Any | None
    """numpy uint8 or uint16 ``[P + R - 1, L, k]``, or None for a dense model or when capture is off."""
    finish_reason: str
    """``stop`` or ``length``."""
    policy_version: int
    """Version of the weights that generated every token of this response."""
    response_mask: tuple[bool, ...] | None = None
    """R flags, False for tokens that a tool wrote (their ``rollout_log_probs`` are 0); None when the policy sampled all."""
    routed_weights: Any | None = None
    """numpy float32 ``[P + R - 1, L, k]``: gate weights of ``routed_experts`` as the engine applied them, or None."""
    cached_tokens: int | None = None
    """Prompt tokens whose keys, values and routing came from the prefix cache; None when the engine does not say."""
    preemptions: int | None = None
    """Times that the engine threw this sample's keys and values away and computed them again; None when it does not say."""
    reward: float = 0.0
    """Set by the verifier after generation; finite."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch: S whole sequences packed back to back into T tokens, no padding between them.

    Per-token arrays are aligned to *predicted* positions: entry t speaks of ``token_ids[t + 1]`` given the tokens up to t
    of the same sequence. The last position of each sequence predicts nothing and has ``loss_mask`` 0.
    """

    token_ids: torch.Tensor
    """int64 ``[T]``."""
    position_ids: torch.Tensor
    """int64 ``[T]``, restarting at 0 in each sequence."""
    cu_seqlens: torch.Tensor
    """int32 ``[S + 1]``, sequence boundaries in the packed axis, first 0, last T."""
    targets: torch.Tensor
    """int64 ``[T]``: the next token; 0 where nothing is predicted."""
    loss_mask: torch.Tensor
    """float32 ``[T]``: 1 where the target is a trained (response) token."""
    advantages: torch.Tensor
    """float32 ``[T]``; 0 outside the loss mask."""
    rollout_log_probs: torch.Tensor
    """float32 ``[T]``; 0 outside the loss mask."""
    old_log_probs: torch.Tensor
    """float32 ``[T]``: recomputed by the trainer before the update; 0 outside the loss mask."""
    ref_log_probs: torch.Tensor | None = None
    """float32 ``[T]`` log-probs of the frozen reference policy, or None when no KL term is used."""
    values: torch.Tensor | None = None
    """float32 ``[T]`` of the critic before its update, of the tokens up to t; 0 outside the loss mask; None without a critic."""
    returns: torch.Tensor | None = None
    """float32 ``[T]``: what the critic is trained towards; 0 outside the loss mask; None without a critic."""
    importance_weights: torch.Tensor | None = None
    """float32 ``[T]``: multiply the policy loss; None for none."""
    keep_mask: torch.Tensor | None = None
    """float32 ``[T]``: 0 on trained tokens that the rollout correction rejected, 1 elsewhere; None when nothing was."""
    routed_experts: torch.Tensor | None = None
    """int32 ``[T, L, k]``: expert ids to replay, distinct within a token where ``replay_mask`` is True; None: the router chooses."""
    routed_weights: torch.Tensor | None = None
    """float32 ``[T, L, k]``: gate weights to replay in the order of ``routed_experts``; None: the trainer's own at those ids."""
    replay_mask: torch.Tensor | None = None
    """bool ``[T, L]``: where ``routed_experts`` is the engine's choice; elsewhere the router chooses. Given when they are."""

    def without_replay(self) -> "PackedBatch":
        """The same tokens, routed by the router."""
        return replace(self, routed_experts=None, routed_weights=None, replay_mask=None)

    @property
    def trained_mask(self) -> torch.Tensor:
        """float32 ``[T]``: the loss mask without rejected tokens; sums, lengths and denominators of a loss are over it."""
        return self.loss_mask if self.keep_mask is None else self.loss_mask * self.keep_mask


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """What a forward pass says of each packed position; float32 ``[T]`` each."""

    log_probs: torch.Tensor
    """Natural-log probability of ``targets`` at the configured temperature."""
    entropy: torch.Tensor
    """Entropy of the predictive distribution, in nats, at the same temperature."""


@dataclass(frozen=True, kw_only=True)
class ReplayCounts:
    """What router replay changed, by layer of the whole model, from 0."""

    changed: dict[int, float]
    """Replayed choices of an expert, one for each token and slot, that the trainer's router would not have made."""
    assigned: dict[int, float]
    """All replayed choices."""


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One tensor under its Hugging Face name, as the trainer holds it; never requantized on the way.

    FP8 weights come as two entries: ``<module>.weight`` (float8_e4m3fn ``[N, K]``) and
    ``<module>.weight_scale_inv`` (float32 ``[ceil(N/128), ceil(K/128)]``, multiply to dequantize).
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    metrics: dict[str, float]
    grad_norm: float
    skipped: bool
    """True when the optimizer refused the step (non-finite gradients); the weights are unchanged."""
