"""Worker process of previews: draws a section of an array, within bounds of memory and time.

It is a script of its own, which imports nothing of the service and has neither stores nor
credentials. Standard input is a line of JSON and then the objects that it lists; standard output
is a line of JSON and then the PNG.
"""

import io
import json
import os
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

type Contrast = tuple[float, float]
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
    contrast, png = draw(request, objects)
    sys.stdout.buffer.write(json.dumps({"contrast": contrast}).encode() + b"\n" + png)


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, unless a lower one holds or the system has none."""
    with suppress(ValueError):
        resource.setrlimit(kind, (most, most))


def draw(request: dict[str, Any], objects: dict[str, bytes]) -> tuple[Contrast | None, bytes]:
    """Return the contrast, `None` of labels, colours and constants, and the PNG."""
    values, fill = read_section(request, objects)
    step = -(-max(values.shape[:2]) // SIDE)
    contrast = None
    if request["is_labels"]:
        picture = Image.fromarray(colour(values[::step, ::step, 0]))
    elif request["is_rgb"]:
        picture = Image.fromarray(values).reduce(step)
    else:
        contrast, pixels = stretch(values[..., 0], fill)
        picture = Image.fromarray(pixels).reduce(step)
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return contrast, encoded.getvalue()


def read_section(
    request: dict[str, Any], objects: dict[str, bytes]
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return values of shape ``(rows, columns, others)``, and the fill value if there is one."""
    context = tensorstore.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
    )
    store = tensorstore.KvStore.open("memory://", context=context).result()
    document_name = next(iter(objects))
    for key, data in objects.items():
        is_chunk = key != document_name
        store.write(key, decode(data, request["decoders"]) if is_chunk else data).result()
    spec = {"driver": request["driver"], "kvstore": "memory://"}
    array = tensorstore.open(spec, context=context, open=True, read=True).result()
    section = array[tuple(slice(start, stop) for start, stop in request["ranges"])]
    values = np.transpose(section.read().result(), request["order"])
    return values.reshape(*values.shape[:2], -1), array.fill_value


def decode(data: bytes, codecs: Sequence[dict[str, Any]]) -> bytes:
    """Undo *codecs* of numcodecs, of a list of those that the service trusts."""
    if not codecs:
        return data
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


def stretch(
    values: NDArray[Any], fill: NDArray[Any] | None = None
) -> tuple[Contrast | None, Pixels]:
    """Return the 1st and 99th percentile, and pixels from black to white between these.

    A fill value other than 0 has no influence. Pixels are black where a value is not a number,
    and grey if all others are equal.
    """
    floats = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
    is_valid = np.isfinite(floats)
    if fill is not None and fill != 0:
        is_valid &= values != fill
    valid = floats[is_valid]
    low = high = 0.0
    if valid.size:
        low, high = map(float, np.percentile(valid, (1, 99)))
        if low == high:
            low = float(valid.min())
            high = float(valid.max())
    if not 0 < high - low < np.inf:
        return None, np.where(is_valid, _GREY, 0).astype(np.uint8)
    with np.errstate(over="ignore"):
        scaled = np.nan_to_num(((floats - low) / (high - low)).clip(0, 1))
    return (low, high), (scaled * 255 + 0.5).astype(np.uint8)


if __name__ == "__main__":
    main()
