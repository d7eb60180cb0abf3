"""The shared operators, written element by element from their definition; float32 unless a line says float64."""

import math

import numpy as np

F32 = np.float32
LANES = 16


def dot(x, y):
    """Sum of products: 16 partial sums of every 16th element, then halves added pairwise."""
    lanes = [F32(0)] * LANES
    for index, (a, b) in enumerate(zip(x, y, strict=True)):
        lanes[index % LANES] = F32(lanes[index % LANES] + F32(a * b))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [F32(lanes[i] + lanes[i + half]) for i in range(half)]
    return lanes[0]


def rms_norm_row(x, weight, epsilon):
    """One normalised row."""
    mean = F32(dot(x, x) / F32(len(x)))
    inverse = F32(F32(1) / F32(np.sqrt(F32(np.float64(mean) + epsilon))))
    return np.array([F32(F32(a * inverse) * w) for a, w in zip(x, weight, strict=True)], F32)


def matmul_row(x, weight):
    """One row times each row of ``weight [N, K]``, summed in order."""
    sums = []
    for row in weight:
        total = F32(0)
        for a, b in zip(x, row, strict=True):
            total = F32(total + F32(a * b))
        sums.append(total)
    return np.array(sums, F32)


def attention_row(query, keys, values, factor):
    """One query over its keys ``[n, D]`` in order; exponentials and their sum in float64."""
    scores = [F32(np.float64(dot(query, key)) * factor) for key in keys]
    largest = max(scores)
    weights, total = [], 0.0
    for score in scores:
        weight = math.exp(float(score) - float(largest))
        total += weight
        weights.append(F32(weight))
    out = np.zeros(len(query), F32)
    for weight, value in zip(weights, values, strict=True):
        out = (out + (weight * value).astype(F32)).astype(F32)
    return (out / F32(total)).astype(F32)


def top_k_row(logits, k):
    """Indices of the k largest, the lower index first in a tie."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def router_weights_row(logits, ids, renormalize):
    """Softmax of the chosen ones in float64, over all or over the chosen."""
    largest = max(float(value) for value in logits)
    exponentials = [math.exp(float(value) - largest) for value in logits]
    total = 0.0
    for index in ids if renormalize else range(len(logits)):
        total += exponentials[index]
    return np.array([F32(exponentials[i] / total) for i in ids], F32)
