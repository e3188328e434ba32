"""Images: what is decoded to what, and which files are refused."""

import io
import struct
import zlib

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tests.data.sources.making import fitted, opened, pixels, wanted, write_images
from vafl.data.source_settings import ImageSettings
from vafl.data.sources import images
from vafl.errors import ConfigError, DataError


def decoded(path, **settings):
    source = opened(ImageSettings(str(path), **settings))
    ids = source.ids().to_list()
    encoder, _ = fitted(source, wanted(*ids))
    return encoder.read(source, wanted(*ids), len(ids))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_files_is_read_by_the_stem_of_their_names(tmp_path, channels):
    settings = write_images(tmp_path / "photos", ["b", "a", "c"], channels=channels)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    source = opened(settings)
    assert source.ids().to_list() == ["a", "b", "c"]
    encoder, (report,) = fitted(source, wanted("a"))
    assert encoder.shape == (channels, 4, 6)
    assert report.features == channels * 24
    assert "PNG" in report.type
    assert encoder.names == []
    features = encoder.read(source, wanted("c", "a"), 2)
    expected = np.stack([pixels(2, channels), pixels(1, channels)]).transpose(0, 3, 1, 2)
    assert features == pytest.approx(expected / 255)


def test_a_parquet_file_holds_encoded_images(tmp_path, monkeypatch):
    write_images(tmp_path / "photos", "abcde")
    contents = [(tmp_path / "photos" / f"{name}.png").read_bytes() for name in "abcde"]
    frame = pl.DataFrame({"who": range(5), "photo": contents})
    frame.write_parquet(tmp_path / "a.parquet")
    for part in (1, 1 << 20):
        monkeypatch.setattr(images, "PART_BYTES", part)
        found = decoded(tmp_path / "a.parquet", id="who", column="photo")
        assert (found == decoded(tmp_path / "photos")).all()
    source = opened(ImageSettings(str(tmp_path / "a.parquet"), "who", "photo"))
    encoder, _ = fitted(source, wanted(1))
    with pytest.raises(DataError, match="VFL-2344"):
        encoder.read(source, wanted(1, 9), 2)
    frame.with_columns(pl.when(pl.col("who") != 3).then("photo")).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'VFL-2376.*"3"'):
        decoded(tmp_path / "a.parquet", id="who", column="photo")
    with pytest.raises(DataError, match="VFL-2375"):
        opened(ImageSettings(str(tmp_path / "a.parquet"), "photo", "who"))
    with pytest.raises(DataError, match="VFL-2083"):
        opened(ImageSettings(str(tmp_path / "a.parquet"), "who", "phot"))
    with pytest.raises(ConfigError, match="VFL-2374"):
        opened(ImageSettings(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    ("mode", "ending", "shape"),
    [
        ("1", "png", (1, 4, 4)),
        ("L", "jpg", (1, 4, 4)),
        ("LA", "png", (1, 4, 4)),
        ("I;16", "png", (1, 4, 4)),
        ("I;16", "tif", (1, 4, 4)),
        ("P", "gif", (3, 4, 4)),
        ("RGB", "jpeg", (3, 4, 4)),
        ("RGB", "webp", (3, 4, 4)),
        ("RGB", "bmp", (3, 4, 4)),
        ("L", "pgm", (1, 4, 4)),
        ("RGBA", "png", (3, 4, 4)),
        ("CMYK", "tif", (3, 4, 4)),
    ],
)
def test_modes_and_formats(tmp_path, mode, ending, shape):
    value = 32_768 if mode == "I;16" else 1 if mode == "1" else 128
    if mode in ("RGBA", "CMYK"):
        image = Image.new("RGB", (4, 4), (128, 128, 128)).convert(mode)
    elif mode in ("P", "LA"):
        image = Image.new("L", (4, 4), 128).convert(mode)
    elif mode == "RGB":
        image = Image.new("RGB", (4, 4), (128, 128, 128))
    else:
        image = Image.new(mode, (4, 4), value)
    image.save(tmp_path / f"a.{ending}")
    (found,) = decoded(tmp_path)
    assert found.shape == shape
    assert found == pytest.approx(1.0 if mode == "1" else 0.5, abs=0.01)
    (other,) = decoded(tmp_path, channels=4 - shape[0])
    assert other.shape == (4 - shape[0], 4, 4)
    assert other.mean() == pytest.approx(found.mean(), abs=0.01)


def test_images_of_several_sizes_need_a_size(tmp_path):
    write_images(tmp_path / "photos", ["a"])
    Image.new("L", (8, 8), 255).save(tmp_path / "photos" / "b.png")
    with pytest.raises(DataError, match=r"VFL-2379.*b\.png.*4 x 6.*8 x 8"):
        decoded(tmp_path / "photos")
    found = decoded(tmp_path / "photos", size=(2, 3))
    assert found.shape == (2, 1, 2, 3)
    assert found[1] == pytest.approx(1)
    Image.new("I;16", (8, 8), 65_535).save(tmp_path / "photos" / "b.png")
    assert decoded(tmp_path / "photos", size=(2, 3))[1] == pytest.approx(1)


def bomb(width, height):
    """Return a PNG of this size in a few bytes, without its pixels."""

    def chunk(kind, content):
        whole = kind + content
        return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def refuse(tmp_path, name, content, code):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=code) as error:
        decoded(tmp_path)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    (tmp_path / name).unlink()


def test_what_is_no_image_is_refused_with_the_file_s_name(tmp_path):
    whole = io.BytesIO()
    Image.fromarray(pixels(0, 3, 64, 64)).save(whole, "PNG")
    refuse(tmp_path, "cut.png", whole.getvalue()[: len(whole.getvalue()) // 2], "VFL-2382")
    refuse(tmp_path, "empty.png", b"", "VFL-2382")
    refuse(tmp_path, "text.jpg", b"no image", "VFL-2382")
    refuse(tmp_path, "bomb.png", bomb(100_000, 100_000), "VFL-2382")  # Pillow itself refuses it
    refuse(tmp_path, "large.png", bomb(10_000, 6_000), "VFL-2380")
    refuse(tmp_path, "no-pixels.png", bomb(4, 4), "VFL-2382")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"
    refuse(tmp_path, "script.png", postscript, "VFL-2382")  # decoding it would start a program
    floats = io.BytesIO()
    Image.new("F", (4, 4), 1.0).save(floats, "TIFF")
    refuse(tmp_path, "floats.tif", floats.getvalue(), "VFL-2381")


def outcome(folder):
    try:
        found = decoded(folder, size=(16, 16))
    except DataError as error:
        return error.code
    return "an image" if np.isfinite(found).all() else "not finite"


def test_damage_anywhere_in_a_file_gives_an_error_or_an_image(tmp_path):
    chance = np.random.default_rng(0)
    for kind in images.FORMATS:
        content = io.BytesIO()
        Image.fromarray(pixels(1, 3, 16, 16)).save(content, kind)
        for _ in range(40):
            damaged = bytearray(content.getvalue())
            for place in chance.integers(0, len(damaged), 3):
                damaged[place] = chance.integers(0, 256)
            (tmp_path / "a.png").write_bytes(damaged)
            assert outcome(tmp_path) in ("an image", "VFL-2380", "VFL-2381", "VFL-2382")


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataError, match="VFL-2372"):
        opened(ImageSettings(str(tmp_path)))
    with pytest.raises(DataError, match="VFL-2373"):
        opened(ImageSettings(str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="VFL-2371"):
        opened(ImageSettings(str(tmp_path), "id", "photo"))
    write_images(tmp_path, ["a"])
    Image.new("L", (4, 6)).save(tmp_path / "a.bmp")
    with pytest.raises(DataError, match="VFL-2034"):
        opened(ImageSettings(str(tmp_path))).ids()


def test_an_image_that_is_gone_is_named(tmp_path):
    source = opened(write_images(tmp_path, ["a", "b"]))
    encoder, _ = fitted(source, wanted("a"), flags_absent=True)
    assert encoder.shape == (25,)
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError, match=r"VFL-2377.*b\.png"):
        encoder.read(source, wanted("a", "b"), 2)
    with pytest.raises(DataError, match="VFL-2347"):
        fitted(source, wanted())
