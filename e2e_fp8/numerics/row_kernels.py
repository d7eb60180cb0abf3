"""Compiled loops whose result for one row does not depend on the rows beside it; imported on first use because numba is slow to load.

Each output element is one fixed sequence of IEEE float32 operations (float64 where it says so). Loops run over independent elements
innermost, so the compiler may vectorise them without touching the order of any sum; nothing is compiled with fast-math.
"""

import math

import numba
import numpy as np

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")
LANES = 16
"""A sum over a row is 16 partial sums of every 16th element, added pairwise."""


@_jit
def _lane_total(lanes):
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] = np.float32(lanes[lane] + lanes[lane + width])
        width //= 2
    return lanes[0]


@_jit
def _dot(x, y, lanes):
    """Sum of products of two float32 vectors of one length."""
    size = x.shape[0]
    whole = size // LANES * LANES
    for lane in range(LANES):
        lanes[lane] = np.float32(0)
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += np.float32(x[start + lane] * y[start + lane])
    for lane in range(size - whole):
        lanes[lane] += np.float32(x[whole + lane] * y[whole + lane])
    return _lane_total(lanes)


@_jit
def rms_norm(x, weight, epsilon, out, inverse):
    """``out = x * inverse * weight`` by rows, ``inverse = 1 / sqrt(mean(x * x) + epsilon)``; all float32."""
    lanes = np.empty(LANES, np.float32)
    width = x.shape[1]
    for row in range(x.shape[0]):
        mean = np.float32(_dot(x[row], x[row], lanes) / np.float32(width))
        factor = np.float32(np.float32(1) / np.sqrt(np.float32(mean + epsilon)))
        inverse[row] = factor
        for column in range(width):
            out[row, column] = np.float32(np.float32(x[row, column] * factor) * weight[column])


@_jit
def matmul(x, w, out):
    """``out [M, N] = x [M, K] @ w [K, N]``, every element summed over K in order; all float32."""
    for row in range(x.shape[0]):
        for column in range(out.shape[1]):
            out[row, column] = np.float32(0)
        for k in range(x.shape[1]):
            factor = x[row, k]
            for column in range(out.shape[1]):
                out[row, column] += np.float32(factor * w[k, column])


@_jit
def attention(q, k, v, first_key, positions, softmax_factor, out):
    """Causal attention of packed rows, one query row and head at a time; all float32.

    Query row t attends to key rows ``first_key[t]`` to ``first_key[t] + positions[t]``. The largest score is subtracted, exponentials and
    their sum are float64, the weighted values are summed in key order in float32.
    """
    rows, heads, width = q.shape
    group = heads // k.shape[1]
    lanes = np.empty(LANES, np.float32)
    weights = np.empty(positions.max() + 1 if rows else 1, np.float32)
    for row in range(rows):
        start, count = first_key[row], positions[row] + 1
        for head in range(heads):
            kv_head = head // group
            largest = np.float32(-np.inf)
            for key in range(count):
                weights[key] = np.float32(_dot(q[row, head], k[start + key, kv_head], lanes) * softmax_factor)
                largest = max(largest, weights[key])
            total = 0.0
            for key in range(count):
                weight = math.exp(np.float64(weights[key]) - np.float64(largest))
                total += weight
                weights[key] = np.float32(weight)
            for column in range(width):
                out[row, head, column] = np.float32(0)
            for key in range(count):
                for column in range(width):
                    out[row, head, column] += np.float32(weights[key] * v[start + key, kv_head, column])
            divisor = np.float32(total)
            for column in range(width):
                out[row, head, column] = np.float32(out[row, head, column] / divisor)


@_jit
def top_k(logits, ids):
    """``ids [M, k]`` of the k largest logits of each row, largest first, the lower index first in a tie."""
    rows, experts = logits.shape
    taken = np.empty(experts, np.bool_)
    for row in range(rows):
        taken[:] = False
        for slot in range(ids.shape[1]):
            best = -1
            for expert in range(experts):
                if not taken[expert] and (best < 0 or logits[row, expert] > logits[row, best]):
                    best = expert
            taken[best] = True
            ids[row, slot] = best


@_jit
def router_weights(logits, ids, renormalize, weights):
    """float32 softmax ``weights [M, k]`` of the chosen experts, over all experts or over the chosen ones; float64 inside."""
    for row in range(logits.shape[0]):
        largest, total = np.float64(logits[row].max()), 0.0
        if renormalize:
            for slot in range(ids.shape[1]):
                total += math.exp(np.float64(logits[row, ids[row, slot]]) - largest)
        else:
            for expert in range(logits.shape[1]):
                total += math.exp(np.float64(logits[row, expert]) - largest)
        for slot in range(ids.shape[1]):
            weights[row, slot] = np.float32(math.exp(np.float64(logits[row, ids[row, slot]]) - largest) / total)
