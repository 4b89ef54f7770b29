"""Images in requests: data in the request itself, never fetched from anywhere."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import Any

from crosstrain.serving.api_error import ApiError
from crosstrain.utils.optional_deps import require

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def picture(url: str, most_pixels: int, param: str) -> Any:
    """The RGB PIL image of a `data:` URL in base64; ApiError 400 for any other URL, and for unreadable images."""
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise ApiError(
            400, f"{param}: images are not fetched; send the image itself, as data:image/png;base64,...", param,
            "invalid_image_url",
        )  # fmt: skip
    if not head.lower().endswith(";base64"):
        raise ApiError(400, f"{param}: a data: URL has to be in base64", param, "invalid_base64_image")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):  # also what is not ASCII
        raise ApiError(400, f"{param}: this is not base64", param, "invalid_base64_image") from None
    image = require("PIL.Image", "serving a model that sees")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                pixels = opened.width * opened.height
                if pixels > most_pixels:
                    raise ApiError(
                        400, f"{param}: {pixels} pixels, more than the {most_pixels} that are taken", param,
                        "image_too_large",
                    )  # fmt: skip
                return opened.convert("RGB")
    except ApiError:
        raise
    except Exception:  # PIL raises whatever its decoders come upon
        raise ApiError(
            400, f"{param}: not a readable image; {', '.join(_FORMATS)} are", param, "invalid_image"
        ) from None
