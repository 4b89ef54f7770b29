"""Images in requests: data in the request itself, never fetched from anywhere."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any

from crosstrain.serving.api_error import ApiError, wrong
from crosstrain.utils.optional_deps import require

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def picture(url: str, most_pixels: int, param: str) -> Any:
    """The RGB PIL image of a `data:` URL in base64; ApiError 400 for any other URL, and for unreadable images."""
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        problem = "images are not fetched; send the image itself, as data:image/png;base64,..."
        raise wrong(param, problem, "invalid_image_url")
    if not head.lower().endswith(";base64"):
        raise wrong(param, "a data: URL has to be in base64", "invalid_base64_image")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:  # also for characters beyond ASCII
        raise wrong(param, "this is not base64", "invalid_base64_image") from None
    image = require("PIL.Image", "serving a vision-language model")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with image.open(io.BytesIO(content), formats=_FORMATS) as opened:
                if (pixels := opened.width * opened.height) > most_pixels:
                    raise wrong(param, f"{pixels} pixels, more than the {most_pixels} allowed", "image_too_large")
                return opened.convert("RGB")
    except ApiError:
        raise
    except Exception:  # PIL raises whatever its decoders come upon
        raise wrong(param, f"not a readable image in one of {', '.join(_FORMATS)}", "invalid_image") from None
