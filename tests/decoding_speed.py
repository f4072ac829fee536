"""Times ways to decode and to resize an image: the table "Loading" of evaluation/results/speed.md.

pip install torchcodec simplejpeg opencv-python-headless
taskset -c 1 python -W ignore tests/decoding_speed.py

Not timed: decoding the crop alone. It needs libjpeg-turbo's own interface, which none of these packages has, and
PyTurboJPEG needs a library that pip does not install.
"""

import io
import timeit
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy
import simplejpeg
import torch
import torch.nn.functional as F
import torchcodec.decoders
import torchvision
from PIL import Image

from evaluation.throughput import write_images
from mpp.config import ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.prepare import encode

CROP = (slice(20, 220), slice(30, 270))


def jpeg_of(side: int) -> bytes:
    """A JPEG file whose images are `side` pixels high."""
    with TemporaryDirectory() as folder:
        write_images(Path(folder), side)
        return next(Path(folder).rglob("*.jpg")).read_bytes()


def half(data: bytes) -> numpy.ndarray:
    """A JPEG at half its size by PIL's scaled decoding."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (image.width // 2, image.height // 2))
    return numpy.array(image)


def tensor(data: bytes) -> torch.Tensor:
    """The bytes of a file (N,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def resize(image: torch.Tensor) -> torch.Tensor:
    """An image (C, H, W) at 224 x 224."""
    return F.interpolate(image[None], (224, 224), mode="bilinear", antialias=True)


def ways() -> dict:
    """Name -> a function that decodes or resizes once."""
    jpeg, large = jpeg_of(256), jpeg_of(1024)
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    pixels, ppm, webp = numpy.array(image), encode(decode(jpeg, ImagesConfig()).numpy(), "ppm"), io.BytesIO()
    image.save(webp, "WEBP", quality=90)
    last = torch.from_numpy(pixels).permute(2, 0, 1)
    first = last.contiguous()
    return {
        "decode, torchvision": lambda: torchvision.io.decode_jpeg(tensor(jpeg)),
        "decode, torchcodec": lambda: torchcodec.decoders.decode_jpeg(tensor(jpeg)),
        "decode, simplejpeg": lambda: simplejpeg.decode_jpeg(jpeg),
        "decode, simplejpeg, fast": lambda: simplejpeg.decode_jpeg(jpeg, fastdct=True, fastupsample=True),
        "decode, OpenCV": lambda: cv2.imdecode(numpy.frombuffer(jpeg, "u1"), cv2.IMREAD_COLOR_RGB),
        "decode, PIL": lambda: numpy.array(Image.open(io.BytesIO(jpeg))),
        "decode WebP, PIL": lambda: numpy.array(Image.open(webp)),
        "decode PPM, mpp": lambda: decode(ppm, ImagesConfig()),
        "large, torchvision": lambda: torchvision.io.decode_jpeg(tensor(large)),
        "large, simplejpeg, half": lambda: simplejpeg.decode_jpeg(large, min_factor=2),
        "large, PIL, half": lambda: half(large),
        "resize, torch, channels last": lambda: resize(last[:, CROP[0], CROP[1]]),
        "resize, torch, channels first": lambda: resize(first[:, CROP[0], CROP[1]]),
        "resize, OpenCV, area": lambda: cv2.resize(pixels[CROP], (224, 224), interpolation=cv2.INTER_AREA),
        "resize, PIL": lambda: image.resize((224, 224), Image.BILINEAR, box=(30, 20, 270, 220)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    for name, way in ways().items():
        print(f"{name}: {1e3 * min(timeit.repeat(way, number=20, repeat=31)) / 20:.2f} ms")
