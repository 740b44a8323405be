"""Worker process of previews: draws a section of an array, within bounds of memory and time.

It is a script of its own, which imports nothing of the service and has neither stores nor
credentials. Standard input is a line of JSON and then the objects that it lists; standard output
is a line of JSON and then the PNG.
"""

import io
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore
from numpy.typing import NDArray
from PIL import Image

MOST_MEMORY_NBYTES: Final = 768 * 1024**2
MOST_CPU_S: Final = 10
LONGEST_S: Final = 60
SIDE: Final = 256  # most pixels of a picture along each side
_GOLDEN: Final = 0x9E3779B97F4A7C15
_GREY: Final = 128
_BINS: Final = 64
_PRIMARIES: Final = ("FF0000", "00FF00", "0000FF")

type Contrast = tuple[float, float]
type Values = dict[str, Any]
"""Members of `PlaneValues`."""
type Pixels = NDArray[np.uint8]


def main() -> None:
    """Answer the request on standard input; any error ends the process."""
    limit(resource.RLIMIT_AS, MOST_MEMORY_NBYTES)
    limit(resource.RLIMIT_CPU, MOST_CPU_S)
    limit(resource.RLIMIT_CORE, 0)
    signal.alarm(LONGEST_S)
    os.nice(5)
    with suppress(OSError):  # where memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    request = json.loads(sys.stdin.buffer.readline())
    objects = {key: sys.stdin.buffer.read(nbytes) for key, nbytes in request["objects"]}
    values, png = draw(request, objects)
    sys.stdout.buffer.write(json.dumps(values).encode() + b"\n" + png)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless a lower one holds or the system has none."""
    with suppress(ValueError):
        resource.setrlimit(kind, (most, most))


def draw(request: dict[str, Any], objects: dict[str, bytes]) -> tuple[Values, bytes]:
    """Return numbers of the values, and the PNG."""
    values, fill = read_section(request, objects)
    step = -(-max(values.shape[:2]) // SIDE)
    measured: Values = {"count": values.size}
    if request["is_labels"]:
        sampled = values[::step, ::step, 0]
        measured |= count_labels(sampled)
        picture = Image.fromarray(colour(sampled))
    elif request["is_rgb"]:
        measured["histograms"] = [
            {**histogram(values[..., at].astype(np.float64)), "shown": (0, 255), "color": color}
            for at, color in enumerate(_PRIMARIES)
        ]
        picture = Image.fromarray(values).reduce(step)
    else:
        contrasts, measured["histograms"], pixels = render(values, fill, request["channels"])
        measured["contrast"] = contrasts[0]
        picture = Image.fromarray(pixels).reduce(step)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return measured, encoded.getvalue()


def read_section(
    request: dict[str, Any], objects: dict[str, bytes]
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return values of shape ``(rows, columns, others)``, and the fill value if there is one."""
    context = tensorstore.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
    )
    store = tensorstore.KvStore.open("memory://", context=context).result()
    document_name = next(iter(objects))
    store.write(document_name, objects.pop(document_name)).result()
    spec = {"driver": request["driver"], "kvstore": "memory://"}
    array = tensorstore.open(spec, context=context, open=True, read=True).result()
    if request["decoders"]:
        section = read_decoded(array, store, request, objects)
    else:
        for key in list(objects):
            store.write(key, objects.pop(key)).result()
        section = array[tuple(slice(*part) for part in request["ranges"])].read().result()
    values = np.transpose(section, request["order"])
    return values.reshape(*values.shape[:2], -1), array.fill_value


def read_decoded(
    array: Any, store: Any, request: dict[str, Any], chunks: dict[str, bytes]
) -> NDArray[Any]:
    """Return the section of an array of Zarr v2, of which *store* has one decoded chunk at a time:
    all of them may be larger than the section by far.
    """
    ranges = request["ranges"]
    fill = 0 if array.fill_value is None else array.fill_value
    shape = [stop - start for start, stop in ranges]
    section = np.full(shape, fill, array.dtype.numpy_dtype)
    for key in list(chunks):
        store.write(key, decode(chunks.pop(key), request["decoders"])).result()
        cell = map(int, re.split("[./]", key))
        sizes = array.chunk_layout.read_chunk.shape
        inside = [
            slice(max(at * size, start), min((at + 1) * size, stop))
            for at, size, (start, stop) in zip(cell, sizes, ranges, strict=True)
        ]
        place = [
            slice(part.start - start, part.stop - start)
            for part, (start, _) in zip(inside, ranges, strict=True)
        ]
        section[tuple(place)] = array[tuple(inside)].read().result()
        store.write(key, None).result()
    return section


def decode(data: bytes, codecs: Sequence[dict[str, Any]]) -> bytes:
    """Undo *codecs* of numcodecs, of a list of those that the service trusts."""
    from numcodecs import get_codec  # noqa: PLC0415 - it takes a fifth of a second

    decoded: Any = data
    for codec in reversed(codecs):
        decoded = get_codec(dict(codec)).decode(decoded)
    return np.ascontiguousarray(decoded).tobytes()


def colour(ids: NDArray[Any]) -> Pixels:
    """Return a colour for each id, black for 0."""
    hashed = ids.astype(np.uint64) * np.uint64(_GOLDEN)
    parts = [hashed >> np.uint64(shift) & np.uint64(0xFF) for shift in (56, 48, 40)]
    bright = np.uint64(64) + np.stack(parts, -1) * np.uint64(3) // np.uint64(4)
    return np.where(ids[..., np.newaxis] != 0, bright, np.uint64(0)).astype(np.uint8)


def count_labels(ids: NDArray[Any]) -> Values:
    """Return the number of labels other than 0, the least and the greatest of them."""
    found = np.unique(ids[(ids > 0) & (ids < np.inf)])
    ends = (int(found[0]), int(found[-1])) if found.size else (0, 0)
    return {"labels": (found.size, *ends)}


def render(
    values: NDArray[Any], fill: NDArray[Any] | None, channels: list[Any]
) -> tuple[list[Contrast | None], list[Values], Pixels]:
    """Return contrasts, histograms and pixels: grey, or the sum of the colours of *channels*."""
    contrasts: list[Contrast | None] = []
    histograms = []
    total = np.zeros((*values.shape[:2], 3), np.float32)
    for at, channel in enumerate(channels or [("", None)]):
        plane = values[..., at]
        floats = (np.abs(plane) if plane.dtype.kind == "c" else plane).astype(np.float64)
        is_valid = np.isfinite(floats)
        if fill is not None and fill != 0:
            is_valid &= plane != fill
        valid = floats[is_valid]
        contrasts.append(percentiles(valid))
        if channel is None:
            continue
        color, window = channel
        shown = window or contrasts[-1]
        if measured := histogram(valid):
            histograms.append({**measured, "shown": shown, "color": color or None})
        shades = stretch(floats, shown, is_valid)
        if not color:
            return contrasts, histograms, (shades * 255 + 0.5).astype(np.uint8)
        parts = np.frombuffer(bytes.fromhex(color), np.uint8)
        total += shades[..., np.newaxis].astype(np.float32) * parts
    return contrasts, histograms, (total.clip(0, 255) + 0.5).astype(np.uint8)


def percentiles(valid: NDArray[Any]) -> Contrast | None:
    """Return the 1st and 99th percentile, or least and greatest value; `None` of constants."""
    if not valid.size:
        return None
    low, high = map(float, np.percentile(valid, (1, 99)))
    if low == high:
        low = float(valid.min())
        high = float(valid.max())
    return (low, high) if 0 < high - low < np.inf else None


def histogram(valid: NDArray[Any]) -> Values:
    """Return least and greatest value, and counts of equal parts between them; empty for none."""
    low, high = (float(valid.min()), float(valid.max())) if valid.size else (0.0, np.inf)
    if not np.isfinite(high - low):
        return {}
    try:
        counts = np.histogram(valid, _BINS, (low, high))[0].tolist()
    except ValueError:  # neighbouring numbers have no others between them
        counts = [valid.size]
    return {"low": low, "high": high, "counts": counts}


def stretch(
    floats: NDArray[Any], shown: Contrast | None, is_valid: NDArray[np.bool_]
) -> NDArray[Any]:
    """Return shades from 0 to 1 of values between those *shown*; not a number is 0.

    Without contrast all valid values are grey.
    """
    if shown is None or not 0 < shown[1] - shown[0] < np.inf:
        return np.where(is_valid, _GREY / 255, 0)
    low, high = shown
    with np.errstate(over="ignore"):
        scaled = ((floats - low) / (high - low)).clip(0, 1)
    return np.where(np.isnan(scaled), 0, scaled)


if __name__ == "__main__":
    main()
