"""Pictures of results: the same results give the same file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def picture(path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Writes the picture in the format of the path's suffix, .svg or .png. Yields its axes, [rows, columns].

    `size` in inches. `options` are those of matplotlib's `subplots`.
    """
    import matplotlib as mpl  # tables do not need it

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "commlayer"
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    try:
        yield axes
        if path.suffix == ".svg":
            figure.savefig(path, metadata={"Date": None})
        else:
            figure.canvas.draw()
            shown = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
            # A palette makes a quarter of the bytes; this method keeps colours of few pixels apart.
            shown.quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    finally:
        plt.close(figure)
