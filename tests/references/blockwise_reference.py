"""Slow block-FP8 arithmetic from the definitions, in NumPy float64 and Python integers; shares no code with the package.

An FP8 value is looked up in the table of all values its format can hold. Products of codes are summed exactly as integers.
"""

import numpy as np

# (mantissa bits, exponent bias, number of finite magnitudes): E4M3 has one NaN magnitude, E5M2 an infinity and three NaNs.
_LAYOUTS = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}
_TILES = {"1x128": (1, 128), "128x1": (128, 1), "128x128": (128, 128)}


def magnitudes(name: str) -> np.ndarray:
    """float64: the value of codes 0, 1, 2, ... up to the largest finite one."""
    mantissa_bits, bias, finite = _LAYOUTS[name]
    values = []
    for code in range(finite):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append(((1 << mantissa_bits) + mantissa) * 2.0 ** (exponent - bias - mantissa_bits))
    return np.array(values)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """uint8 codes nearest to float32 ``values``, ties to the even code, out of range to the largest, NaN to 0x7F."""
    table = magnitudes(name)
    wide = np.minimum(np.where(np.isnan(values), 0, np.abs(values)).astype(np.float64), table[-1])
    above = np.clip(np.searchsorted(table, wide), 1, len(table) - 1)
    below = above - 1
    to_below, to_above = wide - table[below], table[above] - wide
    take_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    code = np.where(take_below, below, above) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def quantize(
    x: np.ndarray, name: str, tile: str, power_2_scale: bool, amax_epsilon: float, largest: float
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale_inv) of a float32 matrix, one tile after the other; ``largest`` is the input dtype's largest finite value."""
    height, width = _TILES[tile]
    rows, columns = x.shape
    codes = np.zeros((rows, columns), np.uint8)
    scale_inv = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            factor = tile_factor(x[part], name, power_2_scale, amax_epsilon, largest)
            scale_inv[i, j] = np.float32(1) / factor
            with np.errstate(all="ignore"):
                codes[part] = encode(x[part] * factor, name)
    return codes, scale_inv


def tile_factor(part: np.ndarray, name: str, power_2_scale: bool, amax_epsilon: float, largest: float) -> np.float32:
    """What the elements of one tile are multiplied by, as float32."""
    numbers = np.abs(part[~np.isnan(part)])
    amax = max(np.float32(numbers.max()) if numbers.size else np.float32(0), np.float32(amax_epsilon))
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        factor = np.float32(magnitudes(name)[-1]) / amax
    factor = np.float32(largest) if np.isinf(factor) else factor
    if power_2_scale:
        factor = np.float32(2.0 ** (np.frexp(np.float64(factor))[1] - 1))
    return factor


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """float64 values of finite codes."""
    return np.where(codes & 0x80, -1.0, 1.0) * magnitudes(name)[codes & 0x7F]


def matmul(x: np.ndarray, x_scale_inv: np.ndarray, w: np.ndarray, w_scale_inv: np.ndarray) -> np.ndarray:
    """float32 ``[M, N]`` of E4M3 codes ``x [M, K]`` (1x128) and ``w [N, K]`` (128x128), one element at a time.

    Codes are integers in units of 2**-9, so a block's sum is a Python integer; it is rounded to float32 once.
    """
    x_units, w_units = ((decode(codes, "e4m3") * 512).astype(np.int64) for codes in (x, w))
    out = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for m in range(x.shape[0]):
        for n in range(w.shape[0]):
            total = np.float32(0)
            for block in range(x_scale_inv.shape[1]):
                part = slice(block * 128, (block + 1) * 128)
                exact = int(np.dot(x_units[m, part], w_units[n, part]))
                factor = x_scale_inv[m, block] * w_scale_inv[n // 128, block]
                total = total + np.float32(exact / 2**18) * factor
            out[m, n] = total
    return out
