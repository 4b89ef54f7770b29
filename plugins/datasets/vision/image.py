"""Open images: convert any file that Pillow reads to upright 8-bit RGB, or raise an error with the reason."""

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from crosstrain import SampleError, os_errors_as, read_regular

LARGEST_IMAGE = 1 << 29  # maximum size of a file, in bytes
# For 16-bit multi-channel images, Pillow keeps only the high bytes. These raw modes read the low bytes into the same
# channels; for gray with alpha, into the second and last channels. N is the machine's byte order.
_LOW_BYTES = {
    f"{mode};16{order}": (f"{mode};16{other}", [0, 1, 2, 3])
    for mode in ("RGB", "RGBA", "RGBX")
    for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
} | {"LA;16B": ("RGBA", [1, 1, 1, 3])}
# TIFF tags: bits per channel, photometric interpretation (0: white is zero), planar configuration (2: separate planes).
_BITS, _PHOTOMETRIC, _PLANAR = 258, 262, 284


class ImageTooLarge(SampleError):
    """An image with more pixels than allowed."""


def open_image(
    data: bytes, name: str, *, formats: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Any:
    """Decode an image into an upright 8-bit RGB PIL image.

    The EXIF orientation is applied, 16-bit values are scaled by 1/257, and transparent pixels are composited on white.
    Only the first frame or page is read. `formats` are Pillow's names of the allowed formats; None: all. Raises
    SampleError, with the image's name, for bytes that are not a complete image, for values of unknown range and for
    more pixels than Pillow's own limit. Raises ImageTooLarge for more than `most_pixels` pixels.
    """
    try:
        # Pillow warns about metadata, and about sizes up to twice its limit; for larger images, it raises an error.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=formats) as image:
            if most_pixels is not None and (pixels := image.width * image.height) > most_pixels:
                raise ImageTooLarge(f"{name} has {pixels} pixels, more than the {most_pixels} allowed")
            _check_known(image)
            return _on_white(_eight_bits(image, data))
    except ImageTooLarge:
        raise
    except Exception as error:  # PIL's decoders may raise anything
        reason = str(error).partition(" <_io.")[0]  # drop the memory address
        raise SampleError(f"{name} is not a readable image ({' '.join(reason.split())})") from None


def open_image_file(path: Path) -> Any:
    """Read and decode an image file as `open_image` does."""
    with os_errors_as(SampleError, f"{path} is not a readable image"):
        return open_image(read_regular(path, LARGEST_IMAGE), str(path))


def _check_known(image: Any) -> None:
    """Raise ValueError for images with values of unknown range, and for images that Pillow decodes wrongly."""
    tags = getattr(image, "tag_v2", {})
    planes = tags.get(_PLANAR) == 2 and image.tile[0][0] == "raw"  # raw: uncompressed
    reasons = {
        "it is a PostScript program, which is not executed: convert it to PNG": image.format == "EPS",
        f"its values (mode {image.mode}) have no known range: convert it to 8 or 16 bits": image.format == "FITS"
        or image.mode == "F"
        # some Pillow versions open 16-bit PNG and PPM files in mode I
        or (image.mode == "I" and image.format not in ("PNG", "PPM")),
        "its transparent level of grey has 2 or 4 bits, which Pillow decodes wrongly: save it with 8 bits": (
            image.format == "PNG" and "transparency" in image.info and image.tile[0][3] in ("L;2", "L;4")
        ),
        "its channels are stored in planes, which is not supported: interleave them": planes
        and (max(tags[_BITS]) > 8 or image.mode == "LAB"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(reason)


def _eight_bits(image: Any, data: bytes) -> Any:
    """Return an upright image with 16-bit channels scaled to 8 bits."""
    arguments = image.tile[0][3] if image.tile else ""
    rawmode = arguments if isinstance(arguments, str) else next(iter(arguments or [""]))
    _turn(image)
    if rawmode not in _LOW_BYTES and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if rawmode in _LOW_BYTES:
        other, places = _LOW_BYTES[rawmode]
        values = values.astype(np.uint16) << 8 | _decoded_as(other, data)[..., places[: values.shape[2]]]
    most = 4095 if rawmode == "I;12" else 65535
    levels = ((np.arange(most + 1) * 255 + most // 2) // most).astype(np.uint8)  # v * 255 / most, rounded
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        levels = levels[::-1]  # Pillow inverts only 8-bit values
    values = values.reshape(image.height, image.width, -1)
    made = np.stack([levels[row] for row in values])  # by rows, to save memory
    if (hidden := image.info.get("transparency")) is not None:  # one 16-bit color is transparent
        made = np.dstack([made, (values != hidden).any(2).astype(np.uint8) * 255])
    return Image.frombytes(("L", "LA", "RGB", "RGBA")[made.shape[2] - 1], image.size, made.tobytes())


def _decoded_as(rawmode: str, data: bytes) -> np.ndarray:
    """Decode an image with the given raw mode of Pillow, and return its values [height, width, channels]."""
    image: Any = Image.open(io.BytesIO(data))
    arguments = [rawmode if isinstance(tile[3], str) else (rawmode, *tile[3][1:]) for tile in image.tile]
    image.tile = [(*tile[:3], given) for tile, given in zip(image.tile, arguments, strict=True)]
    _turn(image)
    return np.asarray(image)


def _turn(image: Any) -> None:
    """Rotate an image upright, in place, according to its EXIF orientation."""
    image.load()
    with os_errors_as(ValueError, "its EXIF orientation cannot be read", Exception):  # the tags may raise anything
        ImageOps.exif_transpose(image, in_place=True)


def _on_white(image: Any) -> Any:
    """Return an image in RGB, composited on white if it has transparency."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    solid = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(solid, mask=solid)
    return white
