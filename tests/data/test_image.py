"""Images are read as their files say: modes, depths, transparency and orientation, pixel by pixel."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crosstrain_plugins.builtin.datasets.vision.image import open_image, open_image_file
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from crosstrain.data.chat import SampleError

Array = np.ndarray
SIZE = (12, 20)  # height and width
# The rows and columns of an upright picture, from those of a stored one, by EXIF orientation.
UPRIGHT = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, 3), 7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}  # fmt: skip


def noise(channels: int, dtype: Any = np.uint8, seed: int = 0) -> Array:
    """Random values [height, width, channels] over the whole range of an integer type."""
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max, (*SIZE, channels), dtype, endpoint=True)


def smooth(seed: int = 0) -> Array:
    """A picture whose values change slowly, so that formats with losses keep it."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize(SIZE[::-1], Image.Resampling.BICUBIC))


def scaled(values: Array, most: int = 65535) -> Array:
    """Values of 16 bits in 8: v / 257, rounded; of other depths v * 255 / most."""
    return np.floor(values.astype(np.float64) * 255 / most + 0.5).astype(np.uint8)


def on_white(colour: Array, alpha: Array) -> Array:
    """Colours [h, w, 3] of 8 bits on white, by alpha [h, w, 1] of 8 bits."""
    share = alpha.astype(np.float64) / 255
    return np.floor(colour * share + 255 * (1 - share) + 0.5).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(values: Array, *chunks: bytes) -> bytes:
    """A PNG of 8 or 16 bits [h, w, 1 to 4], written by its specification."""
    height, width, channels = values.shape
    big = values.astype(values.dtype.newbyteorder(">"))
    lines = b"".join(b"\0" + line.tobytes() for line in big)
    head = struct.pack(">IIBBBBB", width, height, 8 * values.itemsize, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(values: Array, photometric: int, order: str = "<", planes: bool = False, **tags: Any) -> bytes:
    """An uncompressed TIFF [h, w, channels], written by its specification; `tags` as t338=[2]."""
    height, width, channels = values.shape
    laid = values.transpose(2, 0, 1) if planes else values
    data = np.ascontiguousarray(laid).astype(values.dtype.newbyteorder(order)).tobytes()
    parts, each = (channels, len(data) // channels) if planes else (1, len(data))
    known = {
        256: [width], 257: [height], 258: [8 * values.itemsize] * channels, 259: [1], 262: [photometric],
        273: [8 + each * part for part in range(parts)], 277: [channels], 278: [height], 279: [each] * parts,
        284: [2 if planes else 1], 339: [{"u": 1, "i": 2, "f": 3}[values.dtype.kind]] * channels,
    }  # fmt: skip
    known |= {int(tag[1:]): value for tag, value in tags.items()}
    start = 8 + len(data) + len(data) % 2
    entries, beyond = struct.pack(f"{order}H", len(known)), b""
    for tag, value in sorted(known.items()):
        kind, letter = (4, "I") if tag in (273, 279) else (3, "H")
        packed = struct.pack(f"{order}{len(value)}{letter}", *value)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", start + 2 + 12 * len(known) + 4 + len(beyond))
            beyond += packed
            packed = place
        entries += struct.pack(f"{order}HHI", tag, kind, len(value)) + packed.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, start)
    return (head + data).ljust(start, b"\0") + entries + b"\0\0\0\0" + beyond


def read(data: bytes) -> Array:
    with warnings.catch_warnings(action="error"):
        image = open_image(data, "a picture")
    assert image.mode == "RGB"
    return np.asarray(image)


# ---- orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    stored = saved(Image.fromarray(smooth()), kind, **options)
    turned = saved(Image.fromarray(smooth()), kind, exif=exif, **options)
    found = read(turned)
    assert np.array_equal(found, UPRIGHT[orientation](read(stored)))
    if kind in ("JPEG", "PNG"):
        bytes_ = torch.frombuffer(bytearray(turned), dtype=torch.uint8)
        theirs = decode_image(bytes_, ImageReadMode.RGB, apply_exif_orientation=True).permute(1, 2, 0).numpy()
        # Their libjpeg and Pillow's may round a conversion of colours differently.
        assert np.abs(found.astype(int) - theirs).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_deflate", "tiff_adobe_deflate"])
def test_tags_of_a_compressed_tiff_turn_its_16_bits(compression: str) -> None:
    values = noise(1, np.uint16)[..., 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(values), "TIFF", compression=compression, exif=exif)
    assert np.array_equal(read(data)[..., 0], scaled(np.rot90(values, 3)))


def test_16_bits_of_several_channels_are_turned() -> None:
    values = noise(3, np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 8
    assert np.array_equal(read(png(values, chunk(b"eXIf", exif.tobytes()[6:]))), np.rot90(scaled(values)))
    assert np.array_equal(read(tiff(values, 2, t274=[8])), np.rot90(scaled(values)))


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "GIF"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.fromarray(np.full((*SIZE, 3), grey, np.uint8)) for grey in (10, 200)]
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if kind == "GIF" else {"exif": exif}
    more = options | ({"lossless": True} if kind == "WEBP" else {})
    found = read(saved(frames[0], kind, save_all=True, append_images=frames[1:], **more))
    assert found.shape[:2] == (SIZE if kind == "GIF" else SIZE[::-1])
    assert np.all(found == 10)


# ---- modes and depths

RGB8, GREY8, GREY16, RGB16 = noise(3), noise(1), noise(1, np.uint16), noise(3, np.uint16)
RGBA8, LA8, RGBA16, LA16 = noise(4), noise(2), noise(4, np.uint16), noise(2, np.uint16)
DEEP = noise(1, np.uint16) % 4096
PALETTE = np.random.default_rng(3).integers(0, 256, (8, 3), dtype=np.uint8)
PLACES = noise(1)[..., 0] % 8


def palette(**options: Any) -> Image.Image:
    image = Image.fromarray(PLACES, "P")
    image.putpalette(PALETTE.tobytes())
    for key, value in options.items():
        image.info[key] = value
    return image


def twelve_bits(values: Array) -> bytes:
    """A TIFF with two values in three bytes."""
    pairs = values.reshape(SIZE[0], -1, 2).astype(np.uint16)
    packed = np.stack([pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], -1)
    raw = packed.astype(np.uint8).reshape(SIZE[0], -1, 1)
    return tiff(raw, 1, t256=[SIZE[1]], t258=[12])


def transparent(values: Array, colour: Array) -> Array:
    """Alpha [h, w, 1] of a PNG in which one colour is transparent."""
    return ((values != colour).any(-1, keepdims=True) * 255).astype(np.uint8)


def grey(values: Array) -> Array:
    return np.repeat(values.reshape(*SIZE, 1), 3, axis=2)


ALPHAS = np.array([0, 40, 90, 128, 200, 255, 255, 255], np.uint8)
HIDDEN16 = struct.pack(">H", int(GREY16[3, 4, 0]))
HIDDEN48 = struct.pack(">HHH", *map(int, RGB16[3, 4]))
SPARSE = RGB8 // 128 * 255  # a few colours, of which one is transparent
FILES: dict[str, tuple[bytes, Array]] = {
    "1": (saved(Image.fromarray(GREY8[..., 0]).convert("1", dither=Image.Dither.NONE), "PNG"),
          grey((GREY8 > 127) * 255)),
    "L": (png(GREY8), grey(GREY8)),
    "RGB": (png(RGB8), RGB8),
    "P": (saved(palette(), "PNG"), PALETTE[PLACES]),
    "P with bytes": (saved(palette(transparency=ALPHAS.tobytes()), "PNG"),
                     on_white(PALETTE[PLACES], ALPHAS[PLACES][..., None])),
    "P with a colour": (saved(palette(transparency=2), "GIF"),
                        on_white(PALETTE[PLACES], ((PLACES != 2) * 255)[..., None])),
    "LA": (png(LA8), on_white(grey(LA8[..., 0]), LA8[..., 1:])),
    "RGBA": (png(RGBA8), on_white(RGBA8[..., :3], RGBA8[..., 3:])),
    "RGBA of WebP": (saved(Image.fromarray(RGBA8), "WEBP", lossless=True, exact=True),
                     on_white(RGBA8[..., :3], RGBA8[..., 3:])),
    "L with a colour": (png(GREY8, chunk(b"tRNS", bytes([0, GREY8[3, 4, 0]]))),
                        on_white(grey(GREY8), transparent(GREY8, GREY8[3, 4]))),
    "RGB with a colour": (png(SPARSE, chunk(b"tRNS", struct.pack(">HHH", *map(int, SPARSE[3, 4])))),
                          on_white(SPARSE, transparent(SPARSE, SPARSE[3, 4]))),
    "PNG, 16 bits": (png(GREY16), grey(scaled(GREY16))),
    "PNG, 16 bits with a colour": (png(GREY16, chunk(b"tRNS", HIDDEN16)),
                                   on_white(grey(scaled(GREY16)), transparent(GREY16, GREY16[3, 4]))),
    "PNG, RGB of 16 bits": (png(RGB16), scaled(RGB16)),
    "PNG, RGB of 16 bits with a colour": (png(RGB16, chunk(b"tRNS", HIDDEN48)),
                                          on_white(scaled(RGB16), transparent(RGB16, RGB16[3, 4]))),
    "PNG, grey and alpha of 16 bits": (png(LA16), on_white(grey(scaled(LA16[..., 0])), scaled(LA16[..., 1:]))),
    "PNG, RGBA of 16 bits": (png(RGBA16), on_white(scaled(RGBA16[..., :3]), scaled(RGBA16[..., 3:]))),
    "TIFF, 8 bits": (tiff(GREY8, 1), grey(GREY8)),
    "TIFF, 0 is white": (tiff(GREY8, 0), grey(255 - GREY8)),
    "TIFF, 16 bits": (tiff(GREY16, 1), grey(scaled(GREY16))),
    "TIFF, 16 bits, big-endian": (tiff(GREY16, 1, ">"), grey(scaled(GREY16))),
    "TIFF, 16 bits, 0 is white": (tiff(GREY16, 0), grey(scaled(65535 - GREY16))),
    "TIFF, 12 bits": (twelve_bits(DEEP), grey(scaled(DEEP, 4095))),
    "TIFF, RGB of 16 bits": (tiff(RGB16, 2), scaled(RGB16)),
    "TIFF, RGB of 16 bits, big-endian": (tiff(RGB16, 2, ">"), scaled(RGB16)),
    "TIFF, RGB in planes": (tiff(RGB8, 2, planes=True), RGB8),
    "TIFF, RGBA": (tiff(RGBA8, 2, t338=[2]), on_white(RGBA8[..., :3], RGBA8[..., 3:])),
    "TIFF, RGBX": (tiff(RGBA8, 2, t338=[0]), RGBA8[..., :3]),
    "TIFF, RGBA of 16 bits": (tiff(RGBA16, 2, t338=[2]), on_white(scaled(RGBA16[..., :3]), scaled(RGBA16[..., 3:]))),
    "TIFF, RGBX of 16 bits": (tiff(RGBA16, 2, ">", t338=[0]), scaled(RGBA16[..., :3])),
    "TIFF, grey and alpha": (tiff(LA8, 1, t338=[2]), on_white(grey(LA8[..., 0]), LA8[..., 1:])),
    "PGM, 16 bits": (b"P5 20 12 65535\n" + GREY16.astype(">u2").tobytes(), grey(scaled(GREY16))),
    "PGM, 12 bits": (b"P5 20 12 4095\n" + DEEP.astype(">u2").tobytes(), grey(scaled(DEEP, 4095))),
    "PPM, 16 bits": (b"P6 20 12 65535\n" + RGB16.astype(">u2").tobytes(), scaled(RGB16)),
    "BMP": (saved(Image.fromarray(RGB8), "BMP"), RGB8),
    "TGA with alpha": (saved(Image.fromarray(RGBA8), "TGA"), on_white(RGBA8[..., :3], RGBA8[..., 3:])),
    "JPEG 2000 with alpha": (saved(Image.fromarray(RGBA8), "JPEG2000"), on_white(RGBA8[..., :3], RGBA8[..., 3:])),
    "JPEG 2000, 16 bits": (saved(Image.fromarray(GREY16[..., 0]), "JPEG2000"), grey(scaled(GREY16))),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_that_the_file_says(name: str) -> None:
    data, expected = FILES[name]
    found = read(data)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_premultiplied_alpha_is_laid_on_white() -> None:
    alpha = np.full((*SIZE, 1), 128, np.uint8)
    colour = (noise(3) // 2).astype(np.uint8)  # times 128 / 255, so at most 128
    expected = colour.astype(int) + 127
    found = read(tiff(np.concatenate([colour, alpha], 2), 2, t338=[1])).astype(int)
    assert np.abs(found - expected).max() <= 2  # divided by alpha and multiplied again, in 8 bits
    found = read(tiff(np.concatenate([colour[..., :1], alpha], 2), 1, t338=[1])).astype(int)
    assert np.abs(found - expected[..., :1]).max() <= 2


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        (saved(Image.fromarray(smooth()), "JPEG"), 2),
        (saved(Image.fromarray(smooth()).convert("L"), "JPEG"), 0),
        (saved(Image.fromarray(smooth()).convert("CMYK"), "JPEG"), 2),
        (saved(Image.fromarray(smooth()), "PNG", bits=8), 0),
        (png(GREY8), 0),
        (saved(Image.fromarray(smooth()), "GIF"), 0),
    ],
)
def test_colours_are_torchvisions(data: bytes, tolerance: int) -> None:
    theirs = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    found = read(data).astype(int)
    assert np.abs(found - theirs.permute(1, 2, 0).numpy()).max() <= tolerance


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB"])
def test_other_colour_spaces_are_converted_as_pillow_does(mode: str) -> None:
    image = Image.fromarray(smooth()).convert(mode) if mode != "LAB" else Image.fromarray(noise(3), "LAB")
    found = read(saved(image, "TIFF"))
    assert np.array_equal(found, np.asarray(image.convert("RGB")))
    assert found.std() > 10


def test_a_logo_with_black_under_its_transparency_is_white_there() -> None:
    logo = np.zeros((*SIZE, 4), np.uint8)
    logo[3:6, 3:6, 3] = 255
    found = read(png(logo))
    assert (found == 0).all(-1).sum() == 9
    assert (found == 255).all(-1).sum() == SIZE[0] * SIZE[1] - 9


# ---- files that are refused

REFUSED = {
    "floats": (tiff(GREY16.astype(np.float32) / 65535, 1), r"mode F\) have no known range"),
    "PFM": (b"Pf\n2 2\n-1.0\n" + np.ones(4, "<f4").tobytes(), r"mode F\) have no known range"),
    "32 bits": (tiff(noise(1, np.int32), 1), r"mode I\) have no known range: convert it to 8 or 16 bits"),
    "16 bits with a sign": (tiff(noise(1, np.int16), 1), r"mode I\) have no known range"),
    "16 bits in planes": (tiff(RGB16, 2, planes=True), "its channels are stored in planes"),
    "LAB in planes": (tiff(RGB8, 8, planes=True), "its channels are stored in planes"),
    "PostScript": (saved(Image.fromarray(RGB8), "EPS"), "a PostScript program"),
    "nothing": (b"", "cannot identify image file"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot identify image file"),
    "a PNG cut off": (png(RGB8)[:-60], "truncated|broken|unrecognized|incomplete|end of"),
    "a JPEG cut off": (saved(Image.fromarray(noise(3)), "JPEG")[:-60], "truncated"),
    "a TIFF cut off": (tiff(RGB16, 2)[:200], ""),
    "a bomb": (png(np.zeros((1, 1, 1), np.uint8)).replace(
        struct.pack(">II", 1, 1), struct.pack(">II", 40_000, 40_000)), ""),
    "broken EXIF": (png(RGB8, chunk(b"eXIf", b"garbage")), "its EXIF orientation cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_image_that_cannot_be_used_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(SampleError, match=rf"^shard: 7\.png is not a readable image \(.*{reason}") as raised:
        open_image(data, "shard: 7.png")
    assert "0x" not in str(raised.value)
    (tmp_path / "x.png").write_bytes(data)
    with pytest.raises(SampleError, match=r"x\.png is not a readable image"):
        open_image_file(tmp_path / "x.png")


def test_the_size_of_an_image_has_pillows_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIZE[0] * SIZE[1] // 2)
    assert np.array_equal(read(png(RGB8)), RGB8)  # up to twice the limit, where Pillow only warns
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIZE[0] * SIZE[1] // 2 - 1)
    with pytest.raises(SampleError, match=r"Image size \(240 pixels\) exceeds limit of 238 pixels"):
        open_image(png(RGB8), "x.png")


@pytest.mark.parametrize("bits", [2, 4])
def test_a_transparent_grey_of_few_bits_is_refused_because_it_would_stay_visible(bits: int) -> None:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0))
    parts = [head, chunk(b"tRNS", b"\0\1"), chunk(b"IDAT", zlib.compress(b"\0" + b"\x11" * bits)), chunk(b"IEND", b"")]
    with pytest.raises(SampleError, match="its transparent level of grey has 2 or 4 bits"):
        open_image(b"\x89PNG\r\n\x1a\n" + b"".join(parts), "a.png")
