"Pictures for tests."

import numpy as np
from PIL import Image


def picture(width: int = 70, height: int = 45, seed: int = 0, mode: str = "RGB") -> Image.Image:
    "A smooth one with a few edges: what a filter does to it is seen."
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / rng.uniform(2, 9) + columns / rng.uniform(2, 9)) for _ in range(3)]
    values = (np.stack(waves, axis=-1) + 1) * 127
    values[: height // 3, : width // 3] = rng.integers(0, 255, 3)
    return Image.fromarray(values.astype(np.uint8)).convert(mode)
