"""A film of a game, with what it has earned written on it."""

from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi.errors import UsageError
from canal_mpi.types import Array

FRAMES_PER_SECOND = 15
ZOOM = 2


class Film:
    """An MP4 file that grows picture by picture."""

    def __init__(self, path: Path) -> None:
        try:
            import imageio
            import imageio_ffmpeg  # noqa: F401  (imageio alone can't write MP4)
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise UsageError(
                "--video needs a film library: pip install 'canal-mpi[video]'."
            ) from error
        self._image, self._draw = Image, ImageDraw
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"fps": FRAMES_PER_SECOND, "macro_block_size": 2, "codec": "libx264"}
        self._writer: Any = imageio.get_writer(path, format="FFMPEG", **options)

    def add(self, picture: Array, words: str) -> None:
        """One more picture, enlarged, with words on top."""
        height, width = picture.shape[:2]
        image = self._image.fromarray(picture).resize((width * ZOOM, height * ZOOM), 0)
        draw = self._draw.Draw(image)
        draw.rectangle((0, 0, width * ZOOM, 15), fill=(0, 0, 0))
        draw.text((4, 2), words, fill=(255, 255, 255))
        self._writer.append_data(np.asarray(image))

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
