"""Writes frames to mp4 or gif, atomically: the file is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ..backends import installed
from ..errors import BadSetting, CannotRun
from ..measure.results import check_writable

FORMATS = (".mp4", ".gif")
# x264's constant rate factor: 0 is lossless, 23 the default, 18 visually almost lossless
QUALITY = "18"


def check_output(path: Path) -> None:
    """Raise an error, before any work, if a video cannot be written there."""
    if path.suffix.lower() not in FORMATS:
        raise BadSetting("--output", f"{path}: expected a name that ends in {' or '.join(FORMATS)}")
    if path.suffix.lower() == ".mp4" and not installed("av"):
        raise CannotRun("mp4 needs PyAV: pip install 'kernelwright[video]', or write a .gif")
    check_writable(path, "--output")


def video_paths(output: Path, videos: int, *, gif: bool = False) -> list[list[Path]]:
    """The files of each video of a batch: numbered if there are several.

    >>> video_paths(Path("boat.mp4"), 2, gif=True)[1]
    [PosixPath('boat-2.mp4'), PosixPath('boat-2.gif')]
    """
    named = [output]
    if videos > 1:
        named = [output.with_stem(f"{output.stem}-{n}") for n in range(1, videos + 1)]
    return [list(dict.fromkeys([p, p.with_suffix(".gif")] if gif else [p])) for p in named]


def write_videos(files: list[list[Path]], videos: Tensor, fps: int) -> list[str]:
    """Write each video to its files; returns their names."""
    for paths, frames in zip(files, videos, strict=True):
        for path in paths:
            write_video(path, frames, fps)
    return [str(path) for paths in files for path in paths]


def write_video(path: Path, frames: Tensor, fps: int) -> None:
    """Write frames [frames, height, width, 3] of bytes, in the format of the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole_or_nothing(path) as part:
        if path.suffix.lower() == ".gif":
            _gif(part, frames, fps)
        else:
            _mp4(part, frames, fps)


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _mp4(path: Path, frames: Tensor, fps: int) -> None:
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": QUALITY})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame.contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def _gif(path: Path, frames: Tensor, fps: int) -> None:
    from PIL import Image

    first, *others = (Image.fromarray(frame.contiguous().numpy()) for frame in frames)
    milliseconds = round(1000 / fps)
    first.save(path, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0)
